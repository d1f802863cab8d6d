"""Real decoding while training: acceptance on held-out prompts, with the draft as it is now."""

import tempfile

import torch

from draftwood.decode.evaluate import evaluate
from draftwood.models.checkpoint import load_draft, save_draft
from draftwood.train.run import Run
from draftwood.train.setup import held_out_prompts
from draftwood.train.sharding import whole_weights


def decode_held_out(run: Run, step: int, epoch: int) -> None:
    """Decodes the prompts that `evaluate` describes on the main process, while the others wait, and logs the outcome.

    The draft decodes in the target's dtype, from a copy; the random state of training is left as it was.
    """
    weights = whole_weights(run.module.draft)
    if run.accelerator.is_main_process:
        settings, target = run.config.evaluate, run.train.features.target
        devices = [target.device] if target.device.type == "cuda" else []
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices):
            draft = load_draft(save_draft(run.module.draft, folder, weights=weights), target)
            report = evaluate(
                target,
                draft,
                held_out_prompts(run.config, run.data_folder),
                tree=settings.tree,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=run.config.seed,
                baseline=False,
            )
        acceptance = report.acceptance
        facts = {
            "acceptance_length": acceptance.acceptance_length,
            "acceptance_length_interval": list(acceptance.acceptance_length_interval),
            "num_prompts": acceptance.num_prompts,
            "tree": settings.tree,
        }
        run.log.decoded(step, epoch, facts)
    run.accelerator.wait_for_everyone()
