"""How often a step waits for the device, counted on the CPU at the calls that would wait on a GPU."""

import pytest
import tiny
import torch
from drafts import make_draft
from host_waits import HostWaits

import draftwood as dw
from draftwood.decode import generate, sampled, verify

SAMPLING = dict(temperature=1.0, top_k=20, top_p=0.9, seed=0)


@pytest.fixture
def waits_of(monkeypatch):
    """`waits_of(target, draft, ids, **settings)`: what each step of a generation waits for."""
    monkeypatch.setattr(verify, "is_free_to_ask", lambda _: False)
    monkeypatch.setattr(sampled, "is_free_to_ask", lambda _: False)
    step, seen = generate._Decoding.step, []

    def watched(decoding):
        with HostWaits() as waits:
            new = step(decoding)
        seen.append(waits)
        return new

    def run(target, draft, ids, **settings):
        seen.clear()
        dw.generate(target, draft, ids, max_new_tokens=14, eos_token_ids=[], **settings)
        return [waits.reads for waits in seen], [waits.copies for waits in seen]

    monkeypatch.setattr(generate._Decoding, "step", watched)
    return run


@pytest.mark.parametrize("settings", [{}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("family", ["llama", "bamba", "qwen3_next", "mamba"])
def test_a_step_without_drafts_reads_the_device_once(family, settings, waits_of):
    reads, copies = waits_of(tiny.target(family), None, tiny.prompt_ids((1, 6)), **settings)
    # Experts of a mixture are chosen on the host by transformers itself.
    assert len(reads) == 13 and all(r["tolist"] == 1 for r in reads)
    assert all(r == {"tolist": 1} and not c for r, c in zip(reads, copies, strict=True)) or family == "qwen3_next"


STRATEGIES = [("chain-3", {}), ("stree", {}), ("dynamic-8", {}), ("dynamic-8", SAMPLING)]
STRATEGIES += [("beam-2x3", {}), ("sampled-2x3", SAMPLING), ("sampled-1x3", SAMPLING)]


@pytest.mark.parametrize(
    ("kind", "tree", "settings"),
    [("eagle", *strategy) for strategy in STRATEGIES]
    + [(kind, "dynamic-8", {}) for kind in ("eagle3", "mamba", "medusa")],
    ids=lambda value: value if isinstance(value, str) else "sampling" if value else "greedy",
)
def test_a_step_with_a_draft_reads_the_device_once_and_sends_without_waiting(kind, tree, settings, waits_of):
    draft = make_draft("bamba", kind=kind)
    reads, copies = waits_of(draft.target, draft, tiny.prompt_ids((2, 6)), tree=tree, **settings)
    # The first step makes the tables of a static tree, which stay; the last ones those of what it is cut to.
    assert reads[1:3] == [{"tolist": 1}] * 2 and not any(copies[1:3])


def test_the_counter_counts_each_kind_of_wait():
    mask = torch.tensor([True, False])
    with HostWaits() as waits:
        values = torch.tensor([1.0, 2.0], device="cpu")
        values.tolist(), values[0].item(), bool(mask.any()), values[mask], torch.equal(values, values)
        mask.nonzero(), values.cpu(), torch.multinomial(values, 1)
        values * 2, torch.tensor([1])
    assert waits.reads["tolist"] == waits.reads["index by a mask"] == waits.reads["equal"] == 1
    assert waits.reads["nonzero"] == waits.reads["cpu"] == waits.reads["multinomial"] == 1
    assert waits.reads["_local_scalar_dense"] >= 2 and waits.copies == {"tensor": 1}
