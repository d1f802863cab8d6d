"""Static trees by name; the class itself is in `draftwood.models.tree`, where the target needs it."""

import re

from draftwood.models.tree import Tree

__all__ = ["PRESETS", "Tree", "tree_preset"]

# Parents of the draft nodes. `stree` is the static tree of STree (arXiv 2505.14969): 3 nodes on each of 4 levels.
# `eagle-25` is EAGLE-1's static tree, `mc_sim_7b_63` in its code: 4, 8, 8, 3 and 2 nodes on 5 levels.
PRESETS: dict[str, list[int]] = {
    "stree": [0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7],
    "eagle-25": [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 8, 13, 13, 13, 21, 21],
}


def tree_preset(name: str) -> Tree | None:
    """The static tree called `name`: `chain-4` (any length), `stree` or `eagle-25`; None where there is none."""
    if match := re.fullmatch(r"chain-([1-9]\d{0,2})", name):
        return Tree.chain(int(match[1]))
    if name in PRESETS:
        return Tree.from_parents([-1, *PRESETS[name]])
    return None
