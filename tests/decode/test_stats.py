import math

import pytest

from draftwood.decode.stats import FAULT_FORWARDS, ForwardStats, RowStats, summarize


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


def test_a_paired_difference_is_narrower_than_its_parts_and_exact_on_equal_drafts():
    from draftwood.decode.stats import paired_difference

    first = [(10 * n, 10) for n in range(1, 11)]  # prompts of very different difficulty
    better = [(10 * n + 1, 10) for n in range(1, 11)]
    assert paired_difference(first, first) == (0.0, (0.0, 0.0))
    value, (low, high) = paired_difference(first, better)
    assert value == pytest.approx(0.1) and low == pytest.approx(0.1) and high == pytest.approx(0.1)
    with pytest.raises(ValueError, match="same ones"):
        paired_difference(first, better[:3])
    with pytest.raises(ValueError, match="no prompt"):
        paired_difference([(0, 0)], [(3, 2)])


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
