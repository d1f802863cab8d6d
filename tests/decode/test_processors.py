"""Logits processors per node: greedy against transformers' generate, sampled by enumeration."""

from collections import defaultdict

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import draftwood as dw
from draftwood.decode.enumeration import SmallModel, every_outcome
from draftwood.decode.processors import PathProcessors
from draftwood.decode.propose import DynamicTree
from draftwood.decode.sampled import Draws, verify_drawn
from draftwood.decode.verify import Sampling, verify_sampled

SMALL = DynamicTree(top_k=3, frontier=3, levels=3, budget=8)


class ByPath(LogitsProcessor):
    """Depends on the sum of the text, its last token and its length: on every token of the path."""

    def __call__(self, input_ids, scores):
        shift = (input_ids.sum(1) * 7 + input_ids[:, -1] * 3 + input_ids.shape[1]) % scores.shape[1]
        columns = (shift[:, None] + torch.arange(scores.shape[1] // 3)) % scores.shape[1]
        return scores.scatter_add(1, columns, torch.full_like(columns, 2, dtype=scores.dtype))


CONFIGS = {
    "repetition penalty": (dict(repetition_penalty=1.3), None),
    "n-grams": (dict(no_repeat_ngram_size=1), None),
    "bad words, lengths": (
        dict(bad_words_ids=[[5], [12], [57], [3, 9]], suppress_tokens=[4], min_new_tokens=9, eos_token_id=7),
        None,
    ),
    "custom": ({}, [ByPath()]),
    "all": (dict(repetition_penalty=1.3, no_repeat_ngram_size=3, forced_eos_token_id=11), [ByPath()]),
}


def by_transformers(target, row, fields, custom):
    config = GenerationConfig(max_new_tokens=14, pad_token_id=0, do_sample=False, **fields)
    processors = LogitsProcessorList(custom or [])
    return target.model.generate(row, generation_config=config, logits_processor=processors)[0, row.shape[1] :].tolist()


@pytest.mark.parametrize("family, name", [*(("llama", name) for name in CONFIGS), ("bamba", "all")])
def test_greedy_output_is_that_of_transformers_in_a_ragged_batch(family, name, targets, tiny, oracle):
    target, (fields, custom) = targets(family), CONFIGS[name]
    rows = [tiny.prompt_ids((1, length), seed) for seed, length in enumerate([7, 2, 4])]
    want = [by_transformers(target, row, fields, custom) for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (7 - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (7 - row.shape[1]) + [1] * row.shape[1] for row in rows])
    torch.manual_seed(0)
    drafts = [oracle(want, 1, 0.1), dw.EagleDraft.from_target(target).eval()]
    for draft in drafts:
        config = GenerationConfig(max_new_tokens=14, **fields)
        settings = dict(generation_config=config, logits_processor=custom, tree=SMALL)
        assert dw.generate(target, draft, ids, attention_mask=mask, **settings).tokens == want
    plain = [by_transformers(target, row, {}, None) for row in rows]
    assert plain != want  # the processors do change the text
    one = dw.generate(target, oracle(want[:1]), rows[0], generation_config=config, logits_processor=custom)
    assert one.tokens == want[:1] and one.steps < len(want[0]) - 1


def test_the_targets_own_processors_act_without_being_asked_for(targets, tiny, monkeypatch):
    target, row = targets("llama"), tiny.prompt_ids((1, 5), 0)
    plain = dw.generate(target, None, row, max_new_tokens=14).tokens[0]
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 1.5)
    want = tiny.greedy(target.model, row, 14)
    assert dw.generate(target, None, row, max_new_tokens=14).tokens == [want] != [plain]
    off = GenerationConfig(repetition_penalty=1.0, max_new_tokens=14)
    assert dw.generate(target, None, row, generation_config=off).tokens == [plain]


class PathModel(SmallModel):
    """Its target is processed by text: a prompt of one token, the root, then the path."""

    def _warped(self, text):
        ids = torch.tensor([[2, 0, *text]])
        return self.warp(ids, self.logits[text][None]).softmax(-1)[0].tolist()


@pytest.mark.parametrize("is_drawn", [False, True], ids=["chosen", "drawn chain"])
@pytest.mark.parametrize("settings", [dict(temperature=1.0), dict(temperature=0.5, top_k=3, top_p=0.9)], ids=str)
def test_sampling_with_processors_has_the_distribution_of_transformers(settings, is_drawn):
    model, vocab = PathModel(4, 3, settings), 4
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), ByPath()])
    model.warp = LogitsProcessorList([*processors, *model.warp])
    on_paths = PathProcessors(lambda length: processors, [torch.tensor([2])])
    tree = dw.Tree.chain(2) if is_drawn else dw.Tree.from_parents([-1, 0, 0, 1, 1, 2])
    log_q = {text: model.log_q[text] for text in [(), *((a,) for a in range(vocab))]}
    if is_drawn:
        fillings = [(float((log_q[()][a] + log_q[a,][b]).exp()), [0, a, b]) for a in range(vocab) for b in range(vocab)]
    else:
        fillings = [(1.0, [0, 1, 3, 0, 2, 1])]
    blocks = defaultdict(float)
    for share, tokens in fillings:
        ids = torch.tensor([tokens])
        draws = Draws(torch.stack([log_q[()], log_q[tokens[1],]])[None], torch.tensor([[0, 1, 0]]), 1)

        def run(ids=ids, tokens=tokens, draws=draws):
            scores = on_paths(model.at_nodes(tree, tokens), [[0]], [0], ids, tree)
            if is_drawn:
                return verify_drawn(scores, ids, tree, draws, Sampling(**settings))
            return verify_sampled(scores, ids, tree, Sampling(**settings))

        for weight, kept in every_outcome(run):
            blocks[tuple(kept.emitted[0])] += share * weight
    assert model.variation(blocks, 3) < 1e-6


def test_without_processors_nothing_is_done_per_node(targets, tiny, monkeypatch):
    monkeypatch.setattr(PathProcessors, "__call__", None)
    dw.generate(targets("llama"), None, tiny.prompt_ids((1, 5)), max_new_tokens=4)


@pytest.mark.parametrize(
    "settings, name",
    [
        (dict(generation_config=GenerationConfig(num_beams=4)), "num_beams is 4"),
        (dict(generation_config=GenerationConfig(guidance_scale=1.5)), "guidance_scale is 1.5"),
        (dict(generation_config=GenerationConfig(do_sample=True, min_p=0.1)), "min_p is 0.1"),
        (dict(generation_config=GenerationConfig(max_length=5)), "max_length is 5 and the prompts are 5"),
        (dict(generation_config=GenerationConfig(), temperature=1.0), "temperature: given beside"),
        (dict(logits_processor=[PrefixConstrainedLogitsProcessor(lambda b, ids: [1], 1)]), "PrefixConstrained"),
        (dict(stop_strings="x"), "no tokenizer"),
        (dict(stop_strings=["x", ""]), "empty string"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings, name, targets, tiny):
    with pytest.raises(ValueError, match=name):
        dw.generate(targets("llama"), None, tiny.prompt_ids((1, 5)), **settings)


@pytest.mark.parametrize("ids", [[[1, 2]], torch.tensor([[1.0, 2.0]]), "text"], ids=["list", "floats", "text"])
def test_prompts_of_a_wrong_type_are_named(ids, targets):
    with pytest.raises(ValueError, match=r"input_ids is (a list|a str|of torch.float32); expected a tensor"):
        dw.generate(targets("llama"), None, ids)
