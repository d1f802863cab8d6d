"""`accelerate launch -m draftwood.train --config <recipe or file> key.sub=value ...`"""

from draftwood.train.launch import run

run()
