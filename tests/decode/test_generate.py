"""Generation against transformers' own generate, with drafts that are bad, good and absent."""

import logging

import pytest
import tiny as tiny_models
import torch

import draftwood as dw
from draftwood.decode.generate import stream
from draftwood.decode.propose import DynamicTree

FAMILIES = ["llama", "qwen3", "mamba2", "bamba"]
SMALL = DynamicTree(top_k=3, frontier=3, levels=3, budget=8)


@pytest.fixture(scope="session")
def prompts(targets, tiny):
    """`prompts(family, n)`: n prompts of different lengths and transformers' greedy continuations of 24 tokens."""
    made = {}

    def get(family: str, count: int):
        if (family, count) not in made:
            rows = [
                tiny.prompt_ids((1, length), seed) for seed, length in zip(range(count), [7, 1, 4, 10], strict=False)
            ]
            made[family, count] = rows, [tiny.greedy(targets(family).model, row, 24) for row in rows]
        return made[family, count]

    return get


def padded(rows, side):
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        place = slice(width - row.shape[1], width) if side == "left" else slice(0, row.shape[1])
        ids[b, place], mask[b, place] = row[0], 1
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_draft_the_output_is_that_of_transformers(family, targets, prompts):
    for row, want in zip(*prompts(family, 4), strict=True):
        out = dw.generate(targets(family), None, row, max_new_tokens=24)
        assert out.tokens == [want] and out.steps == len(want) - 1


@pytest.mark.parametrize("tree", ["chain-3", "stree", SMALL], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_an_untrained_draft_the_output_is_that_of_transformers(family, tree, targets, prompts):
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(targets(family)).eval()
    for row, want in zip(*prompts(family, 4), strict=True):
        assert dw.generate(targets(family), draft, row, max_new_tokens=24, tree=tree).tokens == [want]


@pytest.mark.parametrize("family", sorted(set(tiny_models.FAMILIES) - set(FAMILIES)))
def test_every_other_family_decodes_as_transformers_does_with_a_tree(family, targets, prompts):
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(targets(family)).eval()
    for row, want in zip(*prompts(family, 2), strict=True):
        assert dw.generate(targets(family), draft, row, max_new_tokens=24, tree=SMALL).tokens == [want]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_paths_that_are_not_the_left_most_and_steps_without_drafts_keep_the_output_exact(
    family, targets, prompts, oracle
):
    steps = tokens = off_left = without = 0
    for seed, (row, want) in enumerate(zip(*prompts(family, 4), strict=True)):
        proposer = oracle([want], seed, error_rate=0.1, empty_rate=0.2)
        out = dw.generate(targets(family), proposer, row, max_new_tokens=24)
        assert out.tokens == [want]
        steps, tokens = steps + out.steps, tokens + len(want)
        off_left, without = off_left + proposer.off_left, without + proposer.without_drafts
    assert tokens > 1.8 * steps and off_left > 10 and without > 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_of_a_batch_equal_single_rows(family, side, targets, prompts, oracle):
    rows, want = prompts(family, 3)
    ids, mask = padded(rows, side)
    target = targets(family)
    torch.manual_seed(0)
    for draft in (oracle(want, 1, 0.1, 0.2), dw.EagleDraft.from_target(target).eval(), None):
        out = dw.generate(target, draft, ids, attention_mask=mask, max_new_tokens=24, tree=SMALL)
        assert out.tokens == want
        assert max(len(row.forwards) for row in out.rows) == out.steps


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_no_more_than_max_new_tokens_and_no_needless_forward(limit, targets, prompts, oracle):
    (row, *_), (want, *_) = prompts("bamba", 4)
    assert len(want) > 4
    for draft in (None, oracle([want])):
        out = dw.generate(targets("bamba"), draft, row, max_new_tokens=limit)
        assert out.tokens == [want[:limit]]
        assert out.steps == limit - 1 if draft is None else out.steps <= limit - 1


class Noting:
    """Mixed into the oracle: what it was started with, and at each step the depth asked for and tokens known done."""

    def start(self, input_ids, lengths, features, roots):
        self.started, self.asked = (input_ids, lengths, features), []
        super().start(input_ids, lengths, features, roots)

    def propose(self, max_depth):
        self.asked.append((max_depth, list(self.done)))
        return super().propose(max_depth)


def test_drafts_never_go_deeper_than_the_tokens_that_are_left(targets, prompts, oracle):
    (row, *_), (want, *_) = prompts("llama", 4)
    noting = type("NotingOracle", (Noting, oracle), {})([want])
    dw.generate(targets("llama"), noting, row, max_new_tokens=10)
    assert noting.asked and all(depth == 10 - done - 1 for depth, (done,) in noting.asked)


@pytest.mark.parametrize("seed", range(4))
def test_rows_ahead_of_others_are_cut_at_the_limit_and_then_stand_still(seed, targets, tiny, oracle):
    target, ids = targets("llama"), tiny.prompt_ids((3, 4), 1)
    free = dw.generate(target, None, ids, max_new_tokens=20, eos_token_ids=[]).tokens
    slow = [free[0], [(token + 1) % tiny.VOCAB for token in free[1]], free[2]]
    noting = type("NotingOracle", (Noting, oracle), {})(slow, seed)
    out = dw.generate(target, noting, ids, max_new_tokens=8, eos_token_ids=[])
    assert out.tokens == [row[:8] for row in free]
    assert len(out.rows[1].forwards) == 7 > len(out.rows[0].forwards)
    assert all(depth == 8 - done[1] - 1 for depth, done in noting.asked)  # the slowest row
    assert max(map(max, (done for _, done in noting.asked))) < 8
    assert [sum(f.emitted for f in row.forwards) for row in out.rows] == [7, 7, 7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_draft_is_started_with_every_rows_real_tokens_from_the_left(side, targets, prompts, oracle):
    rows, want = prompts("bamba", 3)
    ids, mask = padded(rows, side)
    target, noting = targets("bamba"), type("NotingOracle", (Noting, oracle), {})(want)
    dw.generate(target, noting, ids, attention_mask=mask, max_new_tokens=4)
    compact, lengths, features = noting.started
    assert lengths == [row.shape[1] for row in rows]
    for b, row in enumerate(rows):
        assert compact[b, : lengths[b]].tolist() == row[0].tolist()
        torch.testing.assert_close(features[b, : lengths[b]], target.features(row)[0], atol=1e-4, rtol=1e-4)


class Whole:
    """Proposes the continuation in one chain."""

    max_length = None

    def __init__(self, continuation):
        self.continuation, self.done = continuation, 1

    def start(self, input_ids, lengths, features, roots):
        self.roots = roots

    def propose(self, max_depth):
        from draftwood.decode.propose import Proposal

        chain = self.continuation[self.done :][:max_depth]
        return Proposal(torch.tensor([[int(self.roots[0]), *chain]]), dw.Tree.chain(len(chain)))

    def advance(self, tokens, features, paths, roots):
        self.done, self.roots = self.done + len(paths[0]), roots


@pytest.mark.parametrize("place", [0, 1, 3, 8])
def test_eos_inside_an_accepted_block_ends_the_row_and_is_kept(place, targets, tiny):
    target, prompt = targets("llama"), tiny.prompt_ids((1, 3), 0)
    free = dw.generate(target, None, prompt, max_new_tokens=12, eos_token_ids=[]).tokens[0]
    assert len(free) == 12
    first = free.index(free[place])
    goes_on_wrong = [*free[: place + 2], (free[(place + 2) % 12] + 1) % tiny.VOCAB, 5]
    out = dw.generate(target, Whole(goes_on_wrong), prompt, max_new_tokens=12, eos_token_ids=free[place])
    assert out.tokens == [free[: first + 1]]
    assert out.steps == (1 if first else 0)
    if first:
        (forward,) = out.rows[0].forwards
        assert (forward.emitted, forward.accepted, forward.missed) == (first, first, False)


def test_a_perfect_chain_needs_one_forward(targets, tiny):
    target, prompt = targets("mamba2"), tiny.prompt_ids((1, 3), 0)
    free = dw.generate(target, None, prompt, max_new_tokens=12, eos_token_ids=[]).tokens[0]
    out = dw.generate(target, Whole(free), prompt, max_new_tokens=12, eos_token_ids=[])
    assert out.tokens == [free] and out.steps == 1
    assert out.rows[0].forwards == [(11, 10, 10, False)] and out.rows[0].acceptance_length == 11


@pytest.mark.parametrize("draft_kind", ["none", "oracle"])
def test_a_seed_reproduces_and_another_differs(draft_kind, targets, prompts, oracle):
    (row, *_), (want, *_) = prompts("qwen3", 4)

    def run(seed):
        draft = None if draft_kind == "none" else oracle([want], 0)
        settings = dict(temperature=1.0, top_p=0.95, top_k=20, eos_token_ids=[])
        return dw.generate(targets("qwen3"), draft, row, max_new_tokens=16, seed=seed, **settings).tokens

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_sampling_with_drafts_has_the_distribution_of_the_target(targets, tiny):
    """The second and third token over many rows of one prompt, against the exact probabilities."""
    target, prompt = targets("bamba"), tiny.prompt_ids((1, 4), 3)
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(target).eval()
    settings = dict(temperature=1.0, top_k=3, eos_token_ids=[], max_new_tokens=3)
    rows = 3000
    tokens = dw.generate(target, draft, prompt.expand(rows, -1), seed=0, tree="stree", **settings).tokens
    texts, counts = torch.tensor(tokens).unique(dim=0, return_counts=True)
    p = torch.ones(len(texts), dtype=torch.float64)
    with torch.no_grad():
        logits = target.model(torch.cat([prompt.expand(len(texts), -1), texts], 1)).logits[:, 3:6].double()
    kept = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf)
    p = kept.softmax(-1).gather(2, texts[..., None]).squeeze(-1).prod(1)
    spread = (rows * p * (1 - p)).sqrt() + 1e-9
    assert ((counts - rows * p).abs() / spread).max() < 4.5
    assert p.sum() > 0.99


def test_past_the_drafts_length_it_stops_drafting_with_one_notice_and_stays_exact(targets, prompts, caplog):
    target = targets("llama")
    (row, *_), (want, *_) = prompts("llama", 4)
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(target).eval()
    for bound in (3, row.shape[1] + 9):  # passed by the prompt; passed on the way
        limited = make_limited(draft, bound)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="draftwood"):
            out = dw.generate(target, limited, row, max_new_tokens=24, tree="chain-4")
        assert out.tokens == [want]
        assert len(caplog.records) == 1 and "going on without drafts" in caplog.text
        depths = [forward.depth for forward in out.rows[0].forwards]
        assert depths[-1] == 0 and (max(depths) > 0) == (bound > 3)
        assert limited.longest <= bound


def make_limited(draft, bound):
    """A strategy around `draft` with a length of its own, noting the furthest position it was run at."""
    from draftwood.decode.propose.static import StaticProposer

    class Limited(StaticProposer):
        longest = 0

        def propose(self, max_depth):
            proposal = super().propose(max_depth)
            self.longest = max(self.longest, max(self.state.lengths) + proposal.tree.max_depth)
            return proposal

    limited = Limited(draft, dw.Tree.chain(4))
    limited.max_length = bound
    return limited


def test_stream_yields_what_generate_returns_and_can_be_left_early(targets, prompts, oracle):
    rows, want = prompts("qwen3", 3)
    ids, mask = padded(rows, "left")
    blocks = stream(targets("qwen3"), oracle(want), ids, attention_mask=mask, max_new_tokens=24)
    seen = [[], [], []]
    for number, block in enumerate(blocks):
        for so_far, new in zip(seen, block.tokens, strict=True):
            so_far += new
        assert block.output.tokens == seen and block.output.steps == number
        if number == 1:
            break
    assert seen != want
    for block in blocks:
        for so_far, new in zip(seen, block.tokens, strict=True):
            so_far += new
    assert seen == want


def test_on_tokens_is_called_with_every_block(targets, prompts):
    (row, *_), (want, *_) = prompts("llama", 4)
    seen = []
    dw.generate(targets("llama"), None, row, max_new_tokens=24, on_tokens=lambda new: seen.extend(new[0]))
    assert seen == want


@pytest.mark.parametrize(
    "arguments, name",
    [
        (dict(input_ids=torch.tensor([1, 2])), "input_ids"),
        (dict(input_ids=torch.zeros(1, 0, dtype=torch.int64)), "input_ids"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(attention_mask=torch.ones(1, 3)), "attention_mask"),
        (dict(attention_mask=torch.zeros(1, 2)), r"rows \[0\]"),
        (dict(temperature=-1), "temperature"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_runs(arguments, name, targets):
    with pytest.raises(ValueError, match=name):
        stream(targets("llama"), None, **{"input_ids": torch.tensor([[3, 4]]), **arguments})
