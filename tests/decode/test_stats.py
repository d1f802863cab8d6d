import itertools
import math

import pytest

from draftwood.decode.stats import FAULT_FORWARDS, ForwardStats, Paired, RowStats, paired, summarize


def row(*forwards):
    return RowStats([ForwardStats(*f) for f in forwards])


# emitted, accepted, depth, missed
FIRST = row((3, 2, 2, False), (1, 0, 2, True), (2, 1, 2, True))
SECOND = row((2, 1, 2, True), (2, 2, 2, False))  # the last one cut by EOS: no bonus token


def test_figures_equal_those_worked_out_by_hand():
    summary = summarize([FIRST, SECOND])
    assert summary.num_forwards == 5 and summary.num_emitted == 10
    assert summary.acceptance_length == 10 / 5
    assert summary.acceptance_length_per_prompt == (6 / 3 + 4 / 2) / 2
    assert summary.survival == [4 / 5, 2 / 5]
    assert summary.alpha == [4 / 5, 2 / 4]
    assert summary.faults == []


def test_micro_weighs_forwards_and_macro_weighs_prompts():
    summary = summarize([row((4, 3, 3, False)), row((1, 0, 3, True), (1, 0, 3, True), (1, 0, 3, True))] * 20)
    assert summary.acceptance_length == 7 / 4
    assert summary.acceptance_length_per_prompt == (4 + 1) / 2
    low, high = summary.acceptance_length_interval
    assert low < 7 / 4 < high < summary.acceptance_length_per_prompt_interval[1]
    assert 7 / 4 < summary.acceptance_length_per_prompt_interval[0] < 5 / 2


def test_a_path_that_ends_at_a_leaf_is_no_miss_of_the_next_depth():
    summary = summarize([row((2, 1, 3, False), (2, 1, 3, True), (4, 3, 3, False))])
    assert summary.alpha == [1, 1 / 2, 1]
    assert summary.survival == [1, 1 / 3, 1 / 3]


def test_acceptance_length_of_uncut_chains_is_one_plus_the_survivals():
    summary = summarize([row(*[(a + 1, a, 4, a < 4) for a in (0, 4, 2, 1, 3, 0, 2)])])
    assert summary.acceptance_length == pytest.approx(1 + sum(summary.survival))
    assert summary.survival == pytest.approx([math.prod(summary.alpha[: d + 1]) for d in range(4)])


def test_decoding_without_drafts_has_acceptance_length_one_and_is_no_fault():
    summary = summarize([row(*[(1, 0, 0, False)] * 200)])
    assert summary.acceptance_length == 1 and summary.alpha == summary.survival == summary.faults == []


def test_no_draft_kept_over_many_forwards_is_called_a_fault():
    few, many = [(1, 0, 4, True)] * (FAULT_FORWARDS - 1), [(1, 0, 4, True)] * FAULT_FORWARDS
    assert summarize([row(*few)]).faults == []
    assert "exactly 1.00" in summarize([row(*many)]).faults[0]
    assert summarize([row(*many, (2, 1, 4, True))]).faults == []


def test_interval_is_seeded_contains_the_figure_and_narrows_with_prompts():
    few = summarize([FIRST, SECOND, row((1, 0, 2, True)), row((3, 2, 2, False))])
    many = summarize([FIRST, SECOND, row((1, 0, 2, True)), row((3, 2, 2, False))] * 25)
    low, high = few.acceptance_length_interval
    assert low < few.acceptance_length < high
    assert many.acceptance_length_interval[1] - many.acceptance_length_interval[0] < (high - low) / 3
    assert few == summarize([FIRST, SECOND, row((1, 0, 2, True)), row((3, 2, 2, False))])


def test_interval_of_prompts_that_are_alike_is_the_figure():
    summary = summarize([FIRST] * 8)
    assert summary.acceptance_length_interval == (2, 2) == summary.acceptance_length_per_prompt_interval


def test_prompts_that_ended_at_prefill_are_left_out():
    assert summarize([FIRST, RowStats()]).num_prompts == 1
    with pytest.raises(ValueError, match="no target forward"):
        summarize([RowStats()])


FIRST_TREE = [(10 * n, 10) for n in range(1, 11)]  # prompts of very different difficulty


def test_paired_figures_are_narrower_than_their_parts_and_exact_on_equal_ways():
    better = [(10 * n + 1, 10) for n in range(1, 11)]
    assert paired(FIRST_TREE, FIRST_TREE) == Paired(0.0, (0.0, 0.0), 1.0, (1.0, 1.0))
    pair = paired(FIRST_TREE, better)
    assert [pair.difference, *pair.interval] == pytest.approx([0.1] * 3)
    pair = paired(FIRST_TREE, [(1.2 * emitted, forwards) for emitted, forwards in FIRST_TREE])
    assert [pair.ratio, *pair.ratio_interval] == pytest.approx([1.2] * 3)
    with pytest.raises(ValueError, match="same ones"):
        paired(FIRST_TREE, better[:3])
    with pytest.raises(ValueError, match="no prompt"):
        paired([(0, 0)], [(3, 2)])


def test_paired_intervals_are_the_percentiles_over_every_resample_of_the_prompts():
    """Four prompts have 256 resamples: enumerated, each prompt's tokens and forwards of both ways kept together."""
    first, second = [(9, 5), (4, 4), (30, 11), (7, 6)], [(12, 5), (6, 4), (31, 10), (7, 4)]
    differences, ratios = [], []
    for drawn in itertools.product(range(4), repeat=4):
        one, other = (sum(w[i][0] for i in drawn) / sum(w[i][1] for i in drawn) for w in (first, second))
        differences.append(other - one)
        ratios.append(other / one)
    pair = paired(first, second, resamples=200_000)
    assert pair.difference == pytest.approx(56 / 23 - 50 / 26) and pair.ratio == pytest.approx(56 / 23 / (50 / 26))
    for got, exact in ((pair.interval, differences), (pair.ratio_interval, ratios)):
        exact = sorted(exact)
        # The sampled quantile lies between exact ones a little to either side.
        for value, share in zip(got, (0.025, 0.975), strict=True):
            low, high = exact[math.floor(256 * (share - 0.01))], exact[min(255, math.ceil(256 * (share + 0.01)))]
            assert low - 1e-9 <= value <= high + 1e-9


def test_prompts_without_a_forward_in_one_way_are_left_out_of_both():
    assert paired([(4, 2), (9, 3)], [(6, 2), (0, 0)]).ratio == 1.5


def test_forwards_are_sorted_by_the_tokens_before_their_root():
    from draftwood.decode.stats import by_context, summarize_groups

    rows = [
        RowStats([ForwardStats(3, 2, 2, True), ForwardStats(1, 0, 2, True)]),
        RowStats([ForwardStats(2, 1, 2, True)]),
    ]
    groups = by_context([126, 600], rows)
    assert {name: [len(row.forwards) for row in found] for name, found in groups.items()} == {
        "0-127": [1],
        "128-511": [1],
        "512-2047": [1],
    }
    summary = summarize_groups(groups)
    assert [group.acceptance_length for group in summary.values()] == [3.0, 1.0, 2.0]
    assert summary["0-127"].num_prompts == summary["0-127"].num_forwards == 1
