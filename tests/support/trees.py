"""Random token trees for the tests."""

import random

from hypothesis import strategies as st


@st.composite
def parent_lists(draw, max_nodes: int = 10, max_depth: int = 6) -> list[int]:
    """Parents of a random tree in topological order: chains, stars and bushes all occur."""
    nodes = draw(st.integers(1, max_nodes))
    style = draw(st.sampled_from(["chain", "star", "bush", "bush"]))
    rng = random.Random(draw(st.integers(0, 2**16)))
    parents, depth = [-1], [0]
    for node in range(1, nodes):
        choices = [j for j in range(node) if depth[j] < max_depth]
        parent = {"chain": choices[-1], "star": 0, "bush": rng.choice(choices)}[style]
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


def random_path(parents: list[int], rng: random.Random) -> list[int]:
    """A path from the root to a random node: the root at least."""
    path = [rng.randrange(len(parents))]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
