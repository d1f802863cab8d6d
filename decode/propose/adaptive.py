"""Drafting as long as it pays, and as deep: a strategy that stops while it loses, and tries again now and then."""

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftwood.decode.propose.base import DraftProposer, LogitsReader, Proposal, Proposer, root_proposal
from draftwood.decode.propose.dynamic import DynamicProposer
from draftwood.decode.propose.joined import JoinedProposer
from draftwood.decode.propose.plan import Plan
from draftwood.models.transfer import send

logger = logging.getLogger(__name__)


def follow(plan: Plan, inner: Proposer | None) -> "AdaptiveProposer | None":
    """`inner` by the plan; None, with one notice, where the plan is not to speculate."""
    if inner is not None and not plan.is_worthwhile:
        _say_once(f"the plan predicts {plan.speedup:.2f}x with drafts: decoding without them")
        return None
    return None if inner is None else AdaptiveProposer(inner, plan)


@cache
def _say_once(text: str) -> None:
    logger.warning(text)


@dataclass(frozen=True)
class Adaptation:
    """Attributes:
    window: steps that the running mean of tokens per step forgets in, and between changes of the depth.
    margin: how far below break-even it must fall for drafting to stop, and rise above it to go on after a try; also
        of the depth.
    shortest_pause, longest_pause: steps without drafts before a try; each that fails doubles the pause.
    trial: steps of a try.
    deepest: bound on the levels of a dynamic tree.
    """

    window: int = 16
    margin: float = 0.05
    shortest_pause: int = 16
    longest_pause: int = 256
    trial: int = 4
    deepest: int = 8


class Depth:
    """The levels of a dynamic tree, one more or one fewer as acceptance drifts.

    A level costs a forward of the draft and brings as many tokens as the share of steps that keep a node of it. It pays
    while these come at less than a token costs now. The share of the next level is that of the last one, falling on as
    it fell there.
    """

    def __init__(self, proposer: DynamicProposer, plan: Plan, level_ms: float, settings: Adaptation):
        self.proposer, self.settings = proposer, settings
        self.planned, self.step_ms, self.level_ms = proposer.settings.levels, plan.step_ms, level_ms

    def start(self) -> None:
        self.proposer.levels = self.planned
        self.shares = [1.0] + [0.0] * max(self.planned, self.settings.deepest)
        self.steps = 0

    def observe(self, kept: list[int], mean: float) -> None:
        """One step kept so many nodes in each row, the root among them; `mean` is that of tokens per step by now."""
        self.steps += 1
        levels = self.proposer.levels
        weight = 1 / min(self.steps, 2 * self.settings.window)
        for level in range(1, levels + 1):
            share = sum(count > level for count in kept) / len(kept)
            self.shares[level] += weight * (share - self.shares[level])
        if self.steps % self.settings.window:
            return
        token_ms = (self.step_ms + (levels - self.planned) * self.level_ms) / mean
        above, last = self.shares[levels - 1], self.shares[levels]
        following = last * last / above if above else 0.0
        if last * token_ms < self.level_ms * (1 - self.settings.margin):
            self.proposer.levels = max(1, levels - 1)
        elif levels < self.settings.deepest and following * token_ms > self.level_ms * (1 + self.settings.margin):
            self.proposer.levels = levels + 1
            self.shares[levels + 1] = following


def _depth_of(inner: Proposer, plan: Plan, settings: Adaptation) -> Depth | None:
    """That of the dynamic tree in `inner`, where there is one and the plan knows what a level costs."""
    proposer = inner.inner if isinstance(inner, JoinedProposer) else inner
    if not isinstance(proposer, DynamicProposer) or plan.level_ms is None:
        return None
    return Depth(proposer, plan, plan.level_ms, settings)


class AdaptiveProposer:
    """Proposes what `inner` does, or nothing while that loses by the plan's costs.

    A tree pays when tokens per step exceed break-even, step_ms / autoregressive_ms. The running mean starts at what the
    plan predicts. A draft that is idle is told nothing; what it missed it reads in one pass before it drafts again.
    A dynamic tree becomes deeper or flatter with what its last level brings.
    """

    def __init__(self, inner: Proposer, plan: Plan, settings: Adaptation | None = None):
        self.inner = inner
        self.max_length = inner.max_length
        self.break_even = plan.step_ms / plan.autoregressive_ms
        self.predicted = plan.tokens_per_step
        self.settings = settings or Adaptation()
        self.is_deferring = isinstance(inner, DraftProposer | JoinedProposer)
        self.depth = _depth_of(inner, plan, self.settings)

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        self.inner.start(input_ids, lengths, features, roots)
        self.roots = roots
        self.mean = self.predicted
        self.pause, self.idle_left, self.trial_left = self.settings.shortest_pause, 0, 0
        self.missed: list[tuple[Tensor, Tensor, list[list[int]]]] = []
        self.is_counted = False
        if self.depth is not None:
            self.depth.start()

    @property
    def is_idle(self) -> bool:
        return self.idle_left > 0

    def propose(self, max_depth: int) -> Proposal:
        self.is_counted = False
        if self.is_idle:
            self.idle_left -= 1
            if self.idle_left:
                return root_proposal(self.roots)
            self.trial_left, self.mean = self.settings.trial, self.break_even
        self._catch_up()
        proposal = self.inner.propose(max_depth)
        # Near the end of the text a tree is cut, which says nothing of the draft.
        self.is_counted = proposal.tree.num_nodes > 1 and proposal.tree.max_depth < max_depth
        return proposal

    def read_logits(self, logits: Tensor) -> None:
        if isinstance(self.inner, LogitsReader) and not self.is_idle:
            self.inner.read_logits(logits)

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        moved = send([bool(path) for path in paths], roots.device)
        self.roots = torch.where(moved, roots, self.roots)
        if self.is_idle and self.is_deferring:
            self.missed.append((tokens[:, :1], features[:, :1], paths))
        else:
            self.inner.advance(tokens, features, paths, roots)
        if self.is_counted:
            self.is_counted = False
            kept = [len(path) for path in paths if path]
            if kept:
                self._judge(sum(kept) / len(kept))
                if self.depth is not None:
                    self.depth.observe(kept, self.mean)

    def _judge(self, tokens: float) -> None:
        """One step with drafts kept so many tokens, the mean over its rows."""
        settings = self.settings
        is_trial = self.trial_left > 0
        weight = 1 / (settings.trial if is_trial else settings.window)
        self.mean += weight * (tokens - self.mean)
        if is_trial:
            self.trial_left -= 1
            if self.trial_left:
                return
            if self.mean > self.break_even * (1 + settings.margin):
                self.pause = settings.shortest_pause
                return
            self.pause = min(2 * self.pause, settings.longest_pause)
        elif self.mean >= self.break_even * (1 - settings.margin):
            return
        self.idle_left = self.pause
        logger.info(
            "drafts lose: %.2f tokens per step, break-even %.2f; going on without for %d steps",
            self.mean,
            self.break_even,
            self.pause,
        )

    def _catch_up(self) -> None:
        """Reads the steps without drafts as one path."""
        if not self.missed:
            return
        tokens = torch.cat([step[0] for step in self.missed], dim=1)
        features = torch.cat([step[1] for step in self.missed], dim=1)
        paths = [[i for i, step in enumerate(self.missed) if step[2][b]] for b in range(tokens.shape[0])]
        self.missed = []
        self.inner.advance(tokens, features, paths, self.roots)
