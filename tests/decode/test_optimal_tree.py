"""The planner's tree against every tree."""

import random

import pytest

from draftwood.decode.optimal_tree import best_tree, decreasing, expected_tokens
from draftwood.decode.tree import Tree


def every_tree(levels, ranks, nodes):
    """All trees of at most `nodes` draft nodes, as sets of rank paths with their parents and elder siblings."""
    seen, new = set(), {frozenset()}
    while new:
        grown = set()
        for tree in new:
            if len(tree) == nodes:
                continue
            for above in [(), *tree]:
                rank = sum(path[:-1] == above for path in tree)
                if len(above) < levels and rank < ranks:
                    grown.add(tree | {(*above, rank)})
        seen |= grown
        new = grown
    return seen


def chance(path, acceptance):
    product = 1.0
    for depth, rank in enumerate(path):
        product *= acceptance[depth][rank]
    return product


@pytest.mark.parametrize("seed", range(12))
def test_no_tree_is_faster_than_the_planners(seed):
    draw = random.Random(seed)
    acceptance = [sorted((draw.random() ** 2 / 2 for _ in range(3)), reverse=True) for _ in range(3)]
    base, per_node, per_level, jump = (draw.random() * s for s in (1.0, 0.1, 0.2, 0.5))

    def cost(drafts, levels):
        return 1 + base + per_node * drafts + per_level * levels + jump * (drafts > 3)

    found = best_tree(acceptance, cost, 6)
    rates = [
        (1 + sum(chance(path, acceptance) for path in tree)) / cost(len(tree), max(map(len, tree)))
        for tree in every_tree(3, 3, 6)
    ]
    assert found.tokens_per_ms == pytest.approx(max(rates), rel=1e-12)
    assert found.tokens_per_step == pytest.approx(expected_tokens(found.parents, acceptance))
    tree = Tree.from_parents(found.parents)
    assert found.step_ms == cost(tree.num_nodes - 1, tree.max_depth)


def test_free_nodes_are_all_taken_and_dear_ones_are_not():
    acceptance = [[0.5, 0.2], [0.4, 0.1]]
    assert len(best_tree(acceptance, lambda drafts, levels: 1.0, 60).parents) == 1 + 2 + 4
    assert best_tree(acceptance, lambda drafts, levels: float(drafts), 60).parents == [-1, 0]
    assert best_tree([[0.0, 0.0]], lambda drafts, levels: 1.0).tokens_per_step == 1


def test_pooling_keeps_the_mean_and_never_rises():
    assert decreasing([0.5, 0.1, 0.3, 0.0], [1, 1, 1, 1]) == [0.5, 0.2, 0.2, 0.0]
    assert decreasing([0.1, 0.4], [3, 1]) == pytest.approx([0.175, 0.175])
    assert decreasing([0.3, 0.2], [0, 0]) == [0.3, 0.2]
