import pytest
import torch

from draftwood.decode.propose import DynamicTree, resolve_tree
from draftwood.decode.tree import Tree, tree_preset


def test_stree_preset_has_three_nodes_on_each_of_four_levels_with_the_published_parents():
    tree = tree_preset("stree")
    assert torch.bincount(tree.depth[0]).tolist() == [1, 3, 3, 3, 3]
    level = [[n for n in range(13) if tree.depth[0, n] == d] for d in range(5)]
    above = [[level[d - 1].index(tree.rows[0][n]) for n in level[d]] for d in range(1, 5)]
    assert above == [[0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]]


def test_eagle_preset_has_25_drafts_on_five_levels_and_favours_first_choices():
    tree = tree_preset("eagle-25")
    assert torch.bincount(tree.depth[0]).tolist() == [1, 4, 8, 8, 3, 2]
    for below in tree.children():
        widths = [len(tree.children()[child]) for child in below]
        assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("length", [1, 4, 12])
def test_chain_preset_is_a_chain(length):
    assert tree_preset(f"chain-{length}").rows == [list(range(-1, length))]


def test_medusas_tree_has_the_published_number_of_children_at_every_node():
    tree = resolve_tree("medusa-63")
    names = [()]
    for node, parent in enumerate(tree.rows[0][1:], 1):
        names.append((*names[parent], tree.children()[parent].index(node)))
    counts = {name: len(below) for name, below in zip(names, tree.children(), strict=True) if below}
    wide = {(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (0, 0): 10, (0, 1): 3, (0, 2): 2, (1, 0): 2, (0, 0, 0): 2}
    single = [(i,) for i in range(4, 10)] + [(0, i) for i in range(3, 8)] + [(2, 0)]
    assert tree.num_nodes == 64 and counts == wide | dict.fromkeys(single, 1)


def test_a_product_gives_every_node_of_a_level_as_many_children():
    tree = resolve_tree("product-3x1x2")
    assert tree.rows == [[-1, 0, 0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6]]


def test_unknown_tree_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'eagle-25'"):
        resolve_tree("eagle25")
    with pytest.raises(ValueError, match="chain-<k>"):
        resolve_tree("chain-0")


def test_names_of_dynamic_trees_resolve():
    assert resolve_tree("dynamic") == resolve_tree(None) == DynamicTree()
    assert resolve_tree("dynamic-16") == DynamicTree.of_budget(16)
    with pytest.raises(ValueError, match="top_k is 0"):
        DynamicTree(top_k=0)


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 5]])
def test_a_node_that_does_not_follow_its_parent_is_refused(parents):
    with pytest.raises(ValueError, match="node"):
        Tree.from_parents(parents)


def test_limited_tree_is_the_tree_above_that_depth():
    tree = Tree.from_parents([-1, 0, 1, 0, 2, 3, 3])
    assert tree.limited(3) is tree
    assert tree.limited(2).rows == [[-1, 0, 1, 0, 3, 3]]
    assert tree.limited(1).rows == [[-1, 0, 0]]
    assert tree.limited(0).rows == [[-1]]
    assert tree.limited(1) is tree.limited(1)


def test_padding_is_nobodys_child():
    tree = Tree.from_parents([[-1, 0, 0], [-1, 0]])
    assert tree.children(1) == [[1], [], []]
    assert tree.links().tolist() == [[-1, 0, 0], [-1, 0, -2]]
