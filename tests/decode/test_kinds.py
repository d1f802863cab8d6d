"""What certify and plan say holds for every kind of draft, each once on a tiny target."""

import pytest
import torch
from drafts import make_draft

import draftwood as dw
from draftwood.decode.acceptance import observe
from draftwood.decode.certify import SAMPLED
from draftwood.decode.certify_greedy import certify_greedy
from draftwood.decode.certify_sampling import certify_sampling
from draftwood.decode.planner import make_plan
from draftwood.decode.propose import make_proposer
from draftwood.models.language_draft import LanguageDraft


@pytest.fixture(params=["eagle", "eagle3", "mamba", "medusa", "language"])
def model(request, targets, tiny):
    """A target and an untrained draft of the kind."""
    if request.param == "language":
        return targets("llama"), LanguageDraft(dw.load_target(tiny.build("llama", seed=1)), targets("llama"))
    draft = make_draft("llama", kind=request.param)
    return draft.target, draft


def test_every_kind_of_draft_is_certified_and_planned(model, tiny):
    target, draft = model
    prompts = [tiny.prompt_ids((1, n), n) for n in (4, 6)]
    evidence = certify_greedy(target, draft, prompts, ["stree"], 6)
    evidence += [certify_sampling(target, draft, prompts[0], tree, rows=40, length=2, seed=0) for tree in SAMPLED]
    assert [(e.name, e.detail) for e in evidence if not e.passed] == []
    plan = make_plan({"float32": model}, prompts, max_new_tokens=10, repeats=1).plans["float32"]
    assert plan.tokens_per_step >= 1 and plan.step_ms > 0
    out = dw.generate(target, draft, prompts[0], max_new_tokens=12, tree=plan)
    assert out.tokens[0] == tiny.greedy(target.model, prompts[0], 12)


def test_a_strategy_that_reads_logits_is_observed_as_it_decodes(targets, tiny):
    target, ids = targets("llama"), tiny.prompt_ids((1, 6))
    read = []

    class Reader:
        max_length = None

        def __init__(self):
            self.inner = make_proposer(None, "lookahead")

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def read_logits(self, logits):
            read.append(logits.shape)
            self.inner.read_logits(logits)

    (seen,) = observe(target, Reader(), [ids], None, max_new_tokens=20)
    assert read and torch.Size(read[0])[-1] == target.vocab_size and seen.trials.any()
