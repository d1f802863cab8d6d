"""The certificate's exact probabilities are those behind the target's own processors."""

import torch

import draftwood as dw
from draftwood.decode.certify_sampling import certify_sampling


def test_a_target_with_a_repetition_penalty_of_its_own_certifies(targets, tiny, monkeypatch):
    target, prompt = targets("bamba"), tiny.prompt_ids((1, 4), 4)
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(target).eval()
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 1.3)
    evidence = certify_sampling(target, draft, prompt, "chain-2", rows=300, length=3, seed=0)
    assert evidence.passed, evidence.detail
