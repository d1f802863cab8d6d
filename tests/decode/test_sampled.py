"""Recursive rejection of drawn drafts against exact enumeration and the target's own probabilities."""

import itertools

import pytest
import torch

import draftwood as dw
from draftwood.decode.propose import DynamicTree, Proposal, SampledTree, make_proposer, resolve_tree
from draftwood.decode.sampled import Draws, draw_without_replacement, try_child, verify_drawn
from draftwood.decode.verify import Sampling
from draftwood.models.medusa import MedusaDraft

SETTINGS = [
    dict(temperature=0.5),
    dict(temperature=1.0),
    dict(temperature=1.5),
    dict(temperature=1.0, top_k=2),
    dict(temperature=1.5, top_p=0.7),
    dict(temperature=0.5, top_k=3, top_p=0.9),
]


def random_p_and_log_q(vocab, settings, seed, impossible=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab, generator=generator, dtype=torch.float64) * 2
    if impossible:  # to the draft, as outside a reduced vocabulary
        logits[1, ::3] = -torch.inf
    return Sampling(**settings).probs(logits[0]), (logits[1] / settings["temperature"]).log_softmax(-1)


def enumerated(p, log_q, k, order=lambda drawn: drawn):
    """Exact distribution of the emitted token over all ordered draws of `k` children, tried in `order` of them."""
    q, out = log_q.exp(), torch.zeros_like(p)
    for drawn in itertools.permutations(range(len(p)), k):
        weight, left = 1.0, 1.0
        for x in drawn:
            weight, left = weight * float(q[x]) / left if left > 1e-12 else 0.0, left - float(q[x])
        rest_p, rest_q = p[None], log_q[None]
        for x in order(drawn):
            trial = try_child(rest_p, rest_q, torch.tensor([x]))
            out[x] += weight * float(trial.chance)
            weight, rest_p, rest_q = weight * (1 - float(trial.chance)), trial.p, trial.log_q
        out += weight * rest_p[0]
    return out


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocab, k", [(4, 1), (4, 2), (4, 3), (4, 4), (5, 2), (5, 4), (6, 3), (8, 1), (8, 2)])
def test_the_emitted_token_has_the_distribution_of_the_target(vocab, k, settings):
    for seed, impossible in [(1, False), (2, True)]:
        p, log_q = random_p_and_log_q(vocab, settings, 10 * vocab + k + seed, impossible)
        if impossible and k > log_q.isfinite().sum():
            continue
        got = enumerated(p, log_q, k)
        assert (got - p).abs().sum() / 2 < 1e-6 and abs(float(got.sum()) - 1) < 1e-9


def test_siblings_sorted_by_probability_would_be_biased():
    p, q = torch.tensor([[0.1, 0.3, 0.6], [0.6, 0.3, 0.1]], dtype=torch.float64)
    for key in (p, q):
        biased = enumerated(p, q.log(), 2, order=lambda drawn, key=key: sorted(drawn, key=lambda x: -float(key[x])))
        assert (biased - p).abs().sum() / 2 > 0.05
    assert (enumerated(p, q.log(), 2) - p).abs().sum() / 2 < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_mass_left_gives_no_nan(dtype):
    inf = torch.inf
    p = torch.tensor([[0.5, 0.5, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0]], dtype=dtype)
    log_q = torch.tensor([[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]], dtype=dtype).log()
    tokens = torch.tensor([0, 0, 1, 1])
    for _ in range(3):
        trial = try_child(p, log_q, tokens)
        assert trial.chance.isfinite().all() and trial.p.isfinite().all()
        torch.testing.assert_close(trial.p.sum(1), torch.ones(4, dtype=dtype))
        p, log_q, tokens = trial.p, trial.log_q, (tokens + 1) % 3
    assert p.tolist()[1:] == [[0, 0, 1], [0, 0, 1], [1, 0, 0]]
    trial = try_child(torch.tensor([[0.0, 0.4, 0.6]]), torch.tensor([[0.0, -500.0, -inf]]), torch.tensor([0]))
    again = try_child(trial.p, trial.log_q, torch.tensor([1]))  # what is left of q is e^-500
    assert trial.chance == 0 and again.chance == pytest.approx(0.4) and again.p.tolist() == [[0, 0, 1]]


def test_draws_are_without_replacement_and_in_drawn_order():
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = draw_without_replacement(q.log().expand(40_000, -1), 3, torch.Generator().manual_seed(0))
    counts = torch.zeros(4, 4, 4).index_put_(tuple(drawn.T), torch.ones(len(drawn)), accumulate=True)
    for a, b, c in itertools.product(range(4), repeat=3):
        want = 0.0 if len({a, b, c}) < 3 else float(q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]))
        assert float(counts[a, b, c]) / len(drawn) == pytest.approx(want, abs=0.01)


def test_whole_trees_of_a_batch_emit_the_distribution_of_one_token_at_a_time():
    """Two levels, p and q differing at every prefix, a draft that lacks one token, rows with trees of their own."""
    rows, vocab, generator = 40_000, 4, torch.Generator().manual_seed(0)
    logits = torch.randn(1 + vocab, vocab, generator=generator) * 1.5  # at the root; after each first token
    known = torch.tensor([1, 3, 0])
    log_q = (torch.randn(1 + vocab, 3, generator=generator) * 1.5).log_softmax(-1)
    first = known[draw_without_replacement(log_q[0].expand(rows, -1), 3, generator)]
    inner = torch.randint(3, (rows, 1), generator=generator)  # the one child that gets children
    above = first.gather(1, inner)[:, 0]
    second = known[draw_without_replacement(log_q[1 + above], 2, generator)]
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), first, second], 1)
    parents = torch.tensor([[-1, 0, 0, 0]]).expand(rows, -1)
    tree = dw.Tree(torch.cat([parents, 1 + inner, 1 + inner], 1), max_depth=2)
    slot = torch.zeros_like(tokens).scatter(1, 1 + inner, 1)
    draws = Draws(torch.stack([log_q[0].expand(rows, -1), log_q[1 + above]], 1), slot, 3, known)
    at_nodes = torch.cat([logits[:1].expand(rows, 1, -1), logits[1 + first], torch.zeros(rows, 2, vocab)], 1)
    kept = verify_drawn(at_nodes, tokens, tree, draws, Sampling(1.3, top_k=3), generator)

    p = Sampling(1.3, top_k=3).probs(logits)
    firsts = torch.tensor([text[0] for text in kept.emitted])
    check_counts(torch.bincount(firsts, minlength=vocab), p[0])
    for token in range(vocab):
        after = [text[1] for text in kept.emitted if len(text) > 1 and text[0] == token]
        if after:
            check_counts(torch.bincount(torch.tensor(after), minlength=vocab), p[1 + token])
    lengths = [len(path) for path in kept.paths]
    assert {*lengths} == {1, 2, 3} == {len(text) for text in kept.emitted}
    for b in range(200):
        assert kept.paths[b] == tree.path(kept.paths[b][-1], b)
        assert kept.emitted[b][:-1] == tokens[b, kept.paths[b][1:]].tolist()
        assert kept.missed[b] == any(parent == kept.paths[b][-1] for parent in tree.rows[b])


def check_counts(counts, p):
    """Pearson's chi-square, three standard deviations above its mean at most; nothing where p is 0."""
    expected = counts.sum() * p.double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    freedom = int(possible.sum()) - 1
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < freedom + 3 * max(2 * freedom, 1) ** 0.5 + 4


@pytest.fixture(params=[None, 20], ids=["whole vocabulary", "reduced vocabulary"])
def draft(request, targets, tiny):
    target = targets("bamba")
    torch.manual_seed(1)
    vocab = None if request.param is None else torch.randperm(tiny.VOCAB)[: request.param]
    return dw.EagleDraft.from_target(target, draft_vocab=vocab).eval()


@pytest.mark.parametrize("tree", ["sampled-3x2", "sampled-1x2", "sampled-1-3"])
def test_generation_has_the_distribution_of_the_target(tree, draft, targets, tiny):
    check_generation(targets("bamba"), draft, tree, tiny.prompt_ids((1, 4), 3))


@torch.no_grad()
def test_generation_from_drawn_tokens_of_medusa_heads_has_it_too(targets, tiny):
    target = targets("bamba")
    torch.manual_seed(2)
    draft = MedusaDraft.from_target(target, num_heads=2)
    for parameter in draft.parameters():
        parameter.normal_(std=0.3)
    proposer = make_proposer(draft, "sampled-3x2", 0.7, torch.Generator().manual_seed(0))
    features = torch.randn(2, 5, target.hidden_dim)
    proposer.start(tiny.prompt_ids((2, 5), 5), [5, 3], features, torch.tensor([7, 9]))
    proposal = proposer.propose(9)
    for b, last in enumerate((4, 2)):
        for node, below in enumerate(proposal.tree.children(b)):
            if below:
                head = draft.heads[len(proposal.tree.path(node, b)) - 1]
                want = (draft.logits(head(features[b, last])) / 0.7).log_softmax(-1)
                got = proposal.draws.at(torch.tensor([node, node]), tiny.VOCAB)[b]
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for tree in ("sampled-3x2", "sampled-1x2"):
        check_generation(target, draft, tree, tiny.prompt_ids((1, 4), 3))


def check_generation(target, draft, tree, prompt, rows=3000):
    """Tokens 2 and 3 over many rows of one prompt, against transformers' exact probabilities."""
    settings = dict(temperature=1.0, top_k=3, eos_token_ids=[], max_new_tokens=4, tree=tree, seed=0)
    out = dw.generate(target, draft, prompt.expand(rows, -1), **settings)
    texts, counts = torch.tensor(out.tokens)[:, :3].unique(dim=0, return_counts=True)
    with torch.no_grad():
        logits = target.model(torch.cat([prompt.expand(len(texts), -1), texts], 1)).logits[:, 3:6].double()
    kept = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf)
    p = kept.softmax(-1).gather(2, texts[..., None]).squeeze(-1).prod(1)
    expected = torch.cat([rows * p[rows * p >= 5], (rows - rows * p[rows * p >= 5].sum())[None]])
    frequent = counts[rows * p >= 5]
    observed = torch.cat([frequent, (rows - frequent.sum())[None]])
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
    assert freedom >= 5 and statistic < freedom + 3 * (2 * freedom) ** 0.5
    assert sum(row.forwards[0].accepted > 0 for row in out.rows) > 20  # drafts were accepted at all


@pytest.mark.parametrize(
    "settings",
    [
        SampledTree((3,) * 3),
        SampledTree((2,) * 4, frontier=1),
        SampledTree((30, 30), frontier=2),
        SampledTree((4, 2, 1)),
    ],
)
def test_the_log_probabilities_handed_over_are_those_after_every_nodes_path(draft, settings, targets, tiny):
    ids, features = tiny.prompt_ids((2, 5), 5), torch.randn(2, 5, targets("bamba").hidden_dim)
    roots = torch.tensor([7, 9])
    proposer = make_proposer(draft, settings, 0.7, torch.Generator().manual_seed(0))
    with torch.no_grad():
        proposer.start(ids, [5, 5], features, roots)
        proposal = proposer.propose(9)
        for b, tokens in enumerate(proposal.tokens.tolist()):
            for node, below in enumerate(proposal.tree.children(b)):
                if not below:
                    continue
                read = torch.cat([ids[b, 1:], roots[b : b + 1]])[None]
                state = draft.new_state(1)
                out = draft.extend(state, features[b : b + 1], read)[:, -1:]
                for n in proposal.tree.path(node, b)[1:]:
                    out = draft.extend(state, out, torch.tensor([[tokens[n]]]))
                want = torch.full((tiny.VOCAB,), -torch.inf)
                known = slice(None) if draft.draft_vocab is None else draft.draft_vocab
                want[known] = (draft.logits(out)[0, 0] / 0.7).log_softmax(-1)
                got = proposal.draws.at(torch.tensor([node, node]), tiny.VOCAB)[b]
                torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
                children, depth = [tokens[n] for n in below], len(proposal.tree.path(node, b)) - 1
                assert len({*children}) == len(children) == min(settings.widths[depth], int(want.isfinite().sum()))
                assert want[children].isfinite().all()
    assert int(proposal.tree.depth.max()) == len(settings.widths)
    assert proposer.propose(1).tree.num_nodes == 1 + len(proposal.tree.children()[0])
    assert proposer.propose(0).draws is None


@torch.no_grad()
def test_siblings_are_in_drawn_order_and_the_likeliest_nodes_of_a_level_get_children(draft, targets, tiny):
    rows, settings = 2000, SampledTree((3,) * 3, frontier=2)
    ids, features = tiny.prompt_ids((1, 5), 5), torch.randn(1, 5, targets("bamba").hidden_dim)
    proposer = make_proposer(draft, settings, 1.0, torch.Generator().manual_seed(0))
    roots = torch.full((rows,), 7)
    proposer.start(ids.expand(rows, -1).clone(), [5] * rows, features.expand(rows, -1, -1), roots)
    proposal = proposer.propose(9)
    q = proposal.draws.at(torch.zeros(rows, dtype=torch.int64), tiny.VOCAB).exp()[0]
    check_counts(torch.bincount(proposal.tokens[:, 1], minlength=tiny.VOCAB), q)
    for b in range(20):
        children, score = proposal.tree.children(b), {0: 0.0}
        for node in range(1, proposal.tree.num_nodes):
            parent = proposal.tree.rows[b][node]
            log_q = proposal.draws.at(torch.full((rows,), parent), tiny.VOCAB)[b, proposal.tokens[b, node]]
            score[node] = score[parent] + float(log_q)
        for level in (1, 2):
            nodes = [n for n in score if len(proposal.tree.path(n, b)) == level + 1]
            with_children = {n for n in nodes if children[n]}
            assert with_children == set(sorted(nodes, key=score.__getitem__)[-2:])


def test_a_seed_reproduces_and_another_differs(draft, targets, tiny):
    def run(seed):
        settings = dict(temperature=1.0, top_p=0.95, eos_token_ids=[], max_new_tokens=12, tree="sampled-2x3")
        return dw.generate(targets("bamba"), draft, tiny.prompt_ids((2, 5)), seed=seed, **settings).tokens

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_greedy_decoding_refuses_a_sampled_tree(draft, targets, tiny):
    with pytest.raises(ValueError, match="temperature is 0.0: set one above 0"):
        dw.generate(targets("bamba"), draft, tiny.prompt_ids((1, 5)), tree="sampled-2x3")


def test_names_of_sampled_trees_resolve():
    assert resolve_tree("sampled-3x4") == SampledTree((3, 3, 3, 3))
    assert isinstance(resolve_tree("dynamic"), DynamicTree)
    assert Proposal(torch.zeros(1, 1), dw.Tree.chain(0)).draws is None
    assert resolve_tree("sampled-4-2-1") == SampledTree((4, 2, 1))
    for name in ("sampled-0x4", "sampled-3", "sampled-3x", "sampled-4-0"):
        with pytest.raises(ValueError, match=f"no tree '{name}'"):
            resolve_tree(name)
    with pytest.raises(ValueError, match="frontier is 0"):
        SampledTree(frontier=0)
    for wrong in ((3, 0), ()):
        with pytest.raises(ValueError, match="widths are"):
            SampledTree(wrong)
