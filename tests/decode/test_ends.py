"""Where a row ends, by every strategy: at EOS inside an accepted block, and at max_new_tokens."""

from itertools import chain

import pytest
import tiny
import torch

import draftwood as dw
from draftwood.decode.generate import stream
from draftwood.models.language_draft import LanguageDraft

GREEDY = ["chain-4", "stree", "eagle-25", "product-2x2x2", "dynamic-8", "beam-3x4", "lookup", "lookahead"]
RUNS = [(tree, temperature) for tree in GREEDY for temperature in (0.0, 1.0)]
RUNS += [("sampled-1x4", 1.0), ("sampled-3x4", 1.0)]


@pytest.fixture(scope="module")
def target():
    """Says token + 1 after a token, round in a circle, with three quarters of its probability."""
    model = tiny.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedded = model.model.embed_tokens.weight
        model.lm_head.weight.copy_(torch.nn.functional.normalize(embedded, dim=1).roll(1, 0))
    return dw.load_target(model)


@pytest.fixture(scope="module")
def prompt():
    """A part of the circle that is reached again before the end: there lookup and lookahead know what follows."""
    return torch.arange(40, tiny.VOCAB + 3)[None] % tiny.VOCAB


@pytest.fixture(scope="module")
def draft(target):
    return LanguageDraft(target, target)  # drafts what the target says


def blocks_of(target, draft, prompt, **settings):
    return [block.tokens[0] for block in stream(target, draft, prompt, **settings)]


def first_inside(blocks):
    """Length of the output up to a token, new in it, that has tokens of its own block behind it."""
    done = []
    for block in blocks:
        for token in block[:-1]:
            done.append(token)
            if len(done) > 1 and done.count(token) == 1:
                return len(done)
        done.append(block[-1])
    return None


@pytest.mark.parametrize(("tree", "temperature"), RUNS)
def test_eos_inside_an_accepted_block_cuts_the_output_behind_it(tree, temperature, target, draft, prompt):
    settings = dict(tree=tree, temperature=temperature, max_new_tokens=58)
    for seed in range(9):
        blocks = blocks_of(target, draft, prompt, seed=seed, eos_token_ids=[], **settings)
        if (length := first_inside(blocks)) is not None:
            break
    free = list(chain(*blocks))
    assert len(free) == 58 and length is not None, "no block to cut was found"
    out = dw.generate(target, draft, prompt, seed=seed, eos_token_ids=[free[length - 1]], **settings)
    assert out.tokens == [free[:length]]
    assert out.rows[0].emitted == length - 1 and out.rows[0].forwards[-1].missed is False


@pytest.mark.parametrize(("tree", "temperature"), RUNS)
def test_max_new_tokens_is_met_exactly(tree, temperature, target, draft, prompt):
    settings = dict(tree=tree, temperature=temperature, eos_token_ids=[], seed=0)
    free = dw.generate(target, None, prompt, max_new_tokens=9, eos_token_ids=[]).tokens[0]
    for limit in (1, 2, 3, 5, 8, 9):
        out = dw.generate(target, draft, prompt, max_new_tokens=limit, **settings)
        assert len(out.tokens[0]) == limit and out.rows[0].emitted == limit - 1
        assert temperature > 0 or out.tokens[0] == free[:limit]
        assert all(forward.depth <= limit - 2 for forward in out.rows[0].forwards)
