"""A language model as the draft: its choices are those of its own plain forwards, and the output is the target's."""

import copy

import pytest
import torch

import draftwood as dw
from draftwood.decode.propose import DynamicTree, SampledTree, make_proposer
from draftwood.models.language_draft import LanguageDraft

SMALL = DynamicTree(top_k=3, frontier=3, levels=3, budget=8)


@pytest.fixture(scope="module")
def models(tiny):
    """`models(family)`: as a target, and as a draft with a disturbed copy of its weights, often right, not always."""
    made = {}

    def get(family: str):
        if family not in made:
            model = tiny.build(family)
            disturbed = copy.deepcopy(model)
            torch.manual_seed(1)
            for parameter in disturbed.parameters():
                parameter.data += 0.004 * torch.randn_like(parameter)
            made[family] = dw.load_target(model), dw.load_target(disturbed)
        return made[family]

    return get


def ragged(tiny, lengths=(7, 1, 4)):
    rows = [tiny.prompt_ids((1, n), seed) for seed, n in enumerate(lengths)]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return rows, ids, mask


@pytest.mark.parametrize(
    "family, drafting, tree",
    [
        ("llama", "llama", "chain-3"),
        ("bamba", "mamba2", "stree"),
        ("mamba2", "qwen3_5_text", SMALL),
        ("bamba", "bamba", SMALL),
        ("bamba", "bamba", "beam-2x3"),
    ],
    ids=str,
)
def test_any_family_drafts_for_any_other_without_a_change_of_the_output(family, drafting, tree, models, tiny):
    target, draft = models(family)[0], LanguageDraft(models(drafting)[1], models(family)[0])
    rows, ids, mask = ragged(tiny)
    out = dw.generate(target, draft, ids, attention_mask=mask, max_new_tokens=16, tree=tree)
    assert out.tokens == [tiny.greedy(target.model, row, 16) for row in rows]
    if family == drafting:
        accepted = [f.accepted for row in out.rows for f in row.forwards]
        assert sum(accepted) > len(accepted) / 2


@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_after_commits_of_any_length_its_log_probabilities_are_those_of_a_plain_forward(family, models, tiny):
    draft = LanguageDraft(models(family)[1], models(family)[0])
    rows, _, _ = ragged(tiny)
    texts = [row[0].tolist() for row in rows]
    ids = torch.tensor([text + [0] * (7 - len(text)) for text in texts])
    roots = torch.tensor([7, 9, 11])
    proposer = make_proposer(draft, SampledTree((3,) * 3), 1.0, torch.Generator().manual_seed(0))
    proposer.start(ids, [7, 1, 4], torch.zeros(3, 7, 1), roots)
    texts = [[*text, root] for text, root in zip(texts, roots.tolist(), strict=True)]
    for take in ([2, 0, None], [0, 3, 1], [3, None, 0], [1, 1, 1]):
        proposal = proposer.propose(9)
        paths, roots = [], torch.tensor([3 + len(texts[0]), 5, 8])
        for b, depth in enumerate(take):
            tokens, tree = proposal.tokens[b].tolist(), proposal.tree
            assert tokens[0] == texts[b][-1]
            for node, below in enumerate(tree.children(b)):
                if below:
                    text = texts[b] + [tokens[n] for n in tree.path(node, b)[1:]]
                    want = draft.model.model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
                    got = proposal.draws.at(torch.tensor([node] * 3), tiny.VOCAB)[b]
                    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            path = [] if depth is None else tree.path(int((tree.depth[b] == depth).nonzero()[-1]), b)
            paths.append(path)
            texts[b] += [*(tokens[n] for n in path[1:]), *([int(roots[b])] if path else [])]
        proposer.advance(proposal.tokens, torch.zeros(*proposal.tokens.shape, 1), paths, roots)


def test_sampled_output_has_the_distribution_of_the_target(models, tiny):
    """Tokens 2 and 3 over many rows of one prompt, against transformers' exact probabilities."""
    target, draft = models("bamba")
    rows, prompt = 1500, tiny.prompt_ids((1, 4), 3)
    settings = dict(temperature=1.0, top_k=3, eos_token_ids=[], max_new_tokens=4, tree="sampled-2x2", seed=0)
    out = dw.generate(target, LanguageDraft(draft, target), prompt.expand(rows, -1), **settings)
    texts, counts = torch.tensor(out.tokens)[:, :3].unique(dim=0, return_counts=True)
    with torch.no_grad():
        logits = target.model(torch.cat([prompt.expand(len(texts), -1), texts], 1)).logits[:, 3:6].double()
    kept = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf)
    p = kept.softmax(-1).gather(2, texts[..., None]).squeeze(-1).prod(1)
    frequent = rows * p >= 5
    expected = torch.cat([rows * p[frequent], (rows - rows * p[frequent].sum())[None]])
    observed = torch.cat([counts[frequent], (rows - counts[frequent].sum())[None]])
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
    assert freedom >= 5 and statistic < freedom + 3 * (2 * freedom) ** 0.5


class Words:
    """As much of a tokenizer as is compared."""

    def __init__(self, words: str):
        self.vocab = {word: i for i, word in enumerate(words.split())}

    def get_vocab(self):
        return self.vocab


def test_another_tokenizer_or_vocabulary_is_refused_and_padding_of_the_vocabulary_is_not(models, tiny, monkeypatch):
    target, draft = models("llama")
    wider = dw.load_target(resized(tiny, 64))
    with pytest.raises(ValueError, match="has 64 tokens, the target .* 61"):
        LanguageDraft(wider, target)
    for model in (target, draft, wider):
        monkeypatch.setattr(model, "tokenizer", Words("a b c"))
    monkeypatch.setattr(draft, "tokenizer", Words("a c b"))
    with pytest.raises(ValueError, match="token 1 is 'c' in one and 'b' in the other"):
        LanguageDraft(draft, target)
    ids = tiny.prompt_ids((2, 5))
    for big, small in ((target, wider), (wider, target)):
        want = [tiny.greedy(big.model, row[None], 12) for row in ids]
        for tree in ("stree", "sampled-2x3"):
            temperature = 0.5 if tree.startswith("sampled") else 0.0
            top_k = 1 if temperature else None
            settings = dict(tree=tree, temperature=temperature, top_k=top_k, max_new_tokens=12)
            out = dw.generate(big, LanguageDraft(small, big), ids, **settings)
            assert out.tokens == want


def resized(tiny, size):
    model = tiny.build("llama", seed=2)
    model.resize_token_embeddings(size, mean_resizing=False)
    return model
