"""`accelerate launch -m draftwood.train --config <recipe or file> key.sub=value ...`"""

import sys

try:
    from draftwood.train.launch import run
except KeyboardInterrupt:  # the import takes seconds
    sys.exit("draftwood.train: interrupted before anything was done")

run()
