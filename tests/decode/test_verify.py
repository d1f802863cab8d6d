"""The acceptance rules against exact enumeration and against transformers' own warpers."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwood.decode.tree import Tree
from draftwood.decode.verify import Sampling, accept, verify_greedy, verify_sampled

SETTINGS = [
    dict(temperature=0.5),
    dict(temperature=1.0),
    dict(temperature=1.5),
    dict(temperature=1.0, top_k=2),
    dict(temperature=1.5, top_p=0.7),
    dict(temperature=0.5, top_k=3, top_p=0.9),
]


def hf_probs(logits, temperature, top_k=None, top_p=None):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(None, logits.reshape(-1, logits.shape[-1])).softmax(-1).reshape(logits.shape)


@pytest.mark.parametrize("settings", SETTINGS)
def test_warped_distribution_equals_that_of_transformers(settings):
    logits = torch.randn(50, 23, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    logits[:10] = logits[:10].round()  # ties at the cut
    torch.testing.assert_close(Sampling(**settings).probs(logits), hf_probs(logits, **settings), atol=1e-12, rtol=0)


def emitted_distribution(vocab, length, parents, tokens, settings, seed):
    """Exact distribution over the first `length` tokens: rule on the tree, then one token at a time. And the truth.

    p depends on the whole prefix. The rule's own randomness is the token drawn at each node: all are enumerated.
    """
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(**settings)
    prefixes = [p for n in range(length) for p in itertools.product(range(vocab), repeat=n)]
    logits = {p: torch.randn(vocab, generator=generator, dtype=torch.float64) * 2 for p in prefixes}
    for p in prefixes[::3]:
        logits[p][torch.randint(vocab, (1,), generator=generator)] = -torch.inf
    truth = {p: hf_probs(logits[p], **settings) for p in prefixes}
    want = torch.zeros((vocab,) * length, dtype=torch.float64)
    for text in itertools.product(range(vocab), repeat=length):
        want[text] = torch.stack([truth[text[:i]][text[i]] for i in range(length)]).prod()

    tree = Tree.from_parents(parents)
    prefix_of = [tuple(tokens[n] for n in tree.path(node)[1:]) for node in range(len(parents))]
    p = torch.stack([sampling.probs(logits[prefix]) for prefix in prefix_of])
    draws = torch.tensor(list(itertools.product(range(vocab), repeat=len(parents))))
    weights = p.gather(1, draws.T).prod(0)
    batch = torch.tensor([[0, *tokens[1:]]]).expand(len(draws), -1)
    kept = accept(batch, tree, lambda node: draws.gather(1, node[:, None]).squeeze(1))
    got = torch.zeros_like(want)
    for text, weight in zip(kept.emitted, weights.tolist(), strict=True):
        for rest in itertools.product(range(vocab), repeat=length - len(text)):
            whole = (*text, *rest)
            got[whole] += weight * float(
                torch.stack([torch.ones(()), *(truth[whole[:i]][whole[i]] for i in range(len(text), length))]).prod()
            )
    return got, want


# Children of the root 1..4 and a second level; the order of the children is arbitrary; one case repeats a token.
TREES = [
    ([-1, 0], [None, 3]),
    ([-1, 0, 0, 1], [None, 2, 0, 1]),
    ([-1, 0, 0, 0, 2], [None, 3, 1, 0, 2]),
    ([-1, 0, 0, 0, 0], [None, 2, 0, 3, 1]),
    ([-1, 0, 0, 1, 2], [None, 1, 1, 0, 2]),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("parents, tokens", TREES)
def test_sampled_output_has_the_distribution_of_one_token_at_a_time(parents, tokens, settings):
    length = max(Tree.from_parents(parents).max_depth + 1, 2)
    got, want = emitted_distribution(4, length, parents, tokens, settings, seed=len(parents))
    assert (got - want).abs().sum() / 2 < 1e-6
    assert abs(float(got.sum()) - 1) < 1e-9


def test_drawn_tokens_have_the_warped_distribution():
    settings = dict(temperature=0.8, top_k=4, top_p=0.9)
    logits = torch.randn(1, 7, generator=torch.Generator().manual_seed(3)) * 2
    draws = Sampling(**settings).draw(logits.expand(20_000, -1), torch.Generator().manual_seed(4))
    share = torch.bincount(draws, minlength=7) / len(draws)
    torch.testing.assert_close(share, hf_probs(logits[0], **settings), atol=0.015, rtol=0)


@pytest.mark.parametrize("settings", [*SETTINGS, dict(temperature=1e-30), dict(temperature=1.0, top_p=1e-9)])
def test_impossible_tokens_and_extreme_scores_give_no_nan(settings):
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf], [1e30, 1e30, -1e30, 0.0], [5e4, 4e4, 0.0, 1.0]])
    p = Sampling(**settings).probs(logits)
    assert p.isfinite().all() and p[0].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(p.sum(-1), torch.ones(3))


def test_drafts_of_probability_zero_are_never_kept():
    logits = torch.full((64, 3, 5), -torch.inf)
    logits[:, :, 4] = 0
    tokens = torch.tensor([[0, 1, 2]]).expand(64, -1)
    kept = verify_sampled(logits, tokens, Tree.from_parents([-1, 0, 0]), Sampling(1.0), torch.Generator())
    assert kept.paths == [[0]] * 64 and kept.emitted == [[4]] * 64


def by_hand(row_parents, row_tokens, choices):
    node, path, emitted = 0, [0], [choices[0]]
    while True:
        below = [n for n, p in enumerate(row_parents) if p == node and row_tokens[n] == choices[node]]
        if not below:
            return path, emitted, any(p == node for p in row_parents)
        node = below[0]
        path.append(node)
        emitted.append(choices[node])


def test_greedy_acceptance_of_a_batch_of_trees_equals_walking_each_by_hand():
    generator = torch.Generator().manual_seed(0)
    rows, tokens = [], torch.randint(3, (40, 9), generator=generator)
    for _ in range(40):
        size = int(torch.randint(1, 10, (1,), generator=generator))
        rows.append([-1, *(int(torch.randint(n, (1,), generator=generator)) for n in range(1, size))])
    tree = Tree.from_parents([*rows, [-1, *range(8)]])
    tokens = torch.cat([tokens, torch.zeros(1, 9, dtype=torch.int64)])
    logits = torch.randn(41, 9, 3, generator=generator)
    logits[40, :, 0] = 9
    kept = verify_greedy(logits, tokens, tree)
    choices = logits.argmax(-1).tolist()
    for b, parents in enumerate([*rows, [-1, *range(8)]]):
        path, emitted, missed = by_hand(parents, tokens[b].tolist(), choices[b])
        assert (kept.paths[b], kept.emitted[b], kept.missed[b]) == (path, emitted, missed)
    assert len(kept.paths[40]) == 9 and {len(path) for path in kept.paths} >= {1, 2, 3}


def test_a_row_that_has_ended_is_not_taken_up_again_by_a_later_draw():
    draws = iter([[9, 1], [1, 2], [1, 9]])  # of the second row every draw but the last is a child
    tokens = torch.tensor([[0, 1, 2], [0, 1, 2]])
    kept = accept(tokens, Tree.chain(2), lambda node: torch.tensor(next(draws)))
    assert kept.paths == [[0], [0, 1, 2]] and kept.emitted == [[9], [1, 2, 9]] and kept.missed == [True, False]


@pytest.mark.parametrize(
    "settings, name",
    [
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=1.0, top_k=0), "top_k"),
        (dict(temperature=1.0, top_p=0.0), "top_p"),
        (dict(temperature=1.0, top_p=1.5), "top_p"),
        (dict(top_p=0.5), "temperature 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**settings)
