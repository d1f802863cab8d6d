"""Static trees by name; the class itself is in `draftwood.models.tree`, where the target needs it."""

import re

from draftwood.models.tree import Tree

__all__ = ["PRESETS", "Tree", "tree_preset"]

# Parents of the draft nodes. `stree` is the static tree of STree (arXiv 2505.14969): 3 nodes on each of 4 levels.
# `eagle-25` is EAGLE-1's static tree, `mc_sim_7b_63` in its code: 4, 8, 8, 3 and 2 nodes on 5 levels.
# `medusa-63` is Medusa's of the same name (arXiv 2401.10774): 10, 28, 23 and 2 nodes on 4 levels.
PRESETS: dict[str, list[int]] = {
    "stree": [0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7],
    "medusa-63": [0] * 10
    + [1] * 10
    + [2] * 7
    + [3] * 3
    + [4, 4, 5, 6, 7, 8, 9, 10]
    + [11] * 10
    + [12] * 3
    + [13, 13, 14, 15, 16, 17, 18, 21, 21, 28, 39, 39],
    "eagle-25": [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 8, 13, 13, 13, 21, 21],
}


def tree_preset(name: str) -> Tree | None:
    """The static tree called `name`, None where there is none: `chain-4` (drafts), `product-4x2x2` (children of every
    node, by level), or one of `PRESETS`.
    """
    if match := re.fullmatch(r"chain-([1-9]\d{0,2})", name):
        return Tree.chain(int(match[1]))
    if match := re.fullmatch(r"product-([1-9]\d?(?:x[1-9]\d?){0,9})", name):
        return _product([int(width) for width in match[1].split("x")])
    if name in PRESETS:
        return Tree.from_parents([-1, *PRESETS[name]])
    return None


def _product(widths: list[int]) -> Tree:
    """All combinations of a level's choices, widths[d] at each node of depth d."""
    parents, level = [-1], [0]
    for width in widths:
        below = [node for node in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return Tree.from_parents(parents)
