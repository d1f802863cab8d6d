"""Lossless speculative generation: prefill, then propose, verify, cut, commit, until every row has ended."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from draftwood.decode.processors import PathProcessors, processors_of, with_custom
from draftwood.decode.propose import Proposer, TreeSpec, make_proposer
from draftwood.decode.propose.base import Drafter, LogitsReader
from draftwood.decode.sampled import verify_drawn
from draftwood.decode.stats import ForwardStats, RowStats
from draftwood.decode.stopping import Stopping
from draftwood.decode.transformers_call import read_config
from draftwood.decode.verify import Acceptance, Sampling, verify_greedy, verify_sampled
from draftwood.models.transfer import send
from draftwood.models.tree import Tree, root_tree

if TYPE_CHECKING:
    from draftwood.models.target import Target

logger = logging.getLogger(__name__)


@dataclass
class GenerateOutput:
    """What was generated, complete or so far.

    Attributes:
        tokens: new tokens of each row, EOS included where it came.
        steps: target forwards after prefill.
        rows: acceptance of each row.
        timings: seconds on the host: `prefill_s` (the draft's included), `propose_s`, `verify_s`, `commit_s`
            (the draft's update included).
        sequences: [B, T + n] int64, prompts and new tokens as transformers' `generate` returns them, ended rows padded;
            None as long as it is not complete.
    """

    tokens: list[list[int]]
    steps: int = 0
    rows: list[RowStats] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    sequences: Tensor | None = None


class Block(NamedTuple):
    """New tokens of each row, [] for one that has ended, and everything so far (one object, which grows)."""

    tokens: list[list[int]]
    output: GenerateOutput


def generate(
    target: "Target",
    draft: Drafter | Proposer | None,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    **settings,
) -> GenerateOutput:
    """Continues `input_ids`; other settings and errors as `stream`.

    Args:
        generation_config: read as transformers' `generate` does, sampling, lengths, ends and processors; what it leaves
            out is the target's own. None: the settings say it all, but for the target's own processors and EOS.
        streamer: gets the prompt, then each block's new tokens; for one row.
        on_tokens: called with each block's new tokens.

    Raises:
        ValueError: a field that is not supported, or that is given as a setting as well.
    """
    _check_prompt(input_ids, settings.get("attention_mask"))
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(
            f"streamer: input_ids has {len(input_ids)} rows; a streamer takes one, on_tokens takes several"
        )
    if generation_config is not None:
        read = read_config(target, generation_config, input_ids.shape[1])
        twice = sorted(settings.keys() & read.keys())
        if twice:
            raise ValueError(
                f"{', '.join(twice)}: given beside a generation_config, which has it too; set it there only"
            )
        settings |= read
    blocks = stream(target, draft, input_ids, **settings)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    for block in blocks:
        if on_tokens is not None:
            on_tokens(block.tokens)
        if streamer is not None and block.tokens[0]:
            streamer.put(torch.tensor(block.tokens[0]))
    if streamer is not None:
        streamer.end()
    ends = own_eos(target)
    pad = (generation_config or target.model.generation_config).pad_token_id
    pad = pad if pad is not None else ends[0] if ends else 0
    width = max(map(len, block.output.tokens))
    new = [[*tokens, *[pad] * (width - len(tokens))] for tokens in block.output.tokens]
    block.output.sequences = torch.cat([input_ids, input_ids.new_tensor(new)], 1)
    return block.output


def stream(
    target: "Target",
    draft: Drafter | Proposer | None,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    tree: TreeSpec = None,
    seed: int | None = None,
    eos_token_ids: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
    generation_config: GenerationConfig | None = None,
) -> Iterator[Block]:
    """Continues `input_ids`, a block at a time; what it emits has the distribution of the target alone.

    Args:
        target: the model whose output it is.
        draft: an EAGLE draft, any other `Proposer`, or None to decode one token at a time.
        input_ids: [B, T] int64.
        attention_mask: [B, T], 1 on real tokens; None: all are.
        max_new_tokens: bound on the new tokens of a row.
        temperature: 0 for greedy.
        top_k: keep so many tokens of the target's distribution; None: all.
        top_p: keep the likeliest tokens that make up this much of it; None: all.
        tree: what the draft fills: a `Tree`, a preset's name, "dynamic", `DynamicTree(...)`; None: "dynamic". Or,
            at a temperature above 0, "sampled-3x4", `SampledTree(...)`.
        seed: of the sampling; None: torch's global generator.
        eos_token_ids: tokens that end a row; None: the target's own; []: none.
        stop_strings: texts that end a row, with the token that completes one.
        logits_processor: called per node with its own text, behind those of the generation config; see `processors`.
        generation_config: its processors (repetition_penalty, bad_words_ids, ...) act, nothing else of it; None: the
            target's own.

    Raises:
        ValueError: the argument at fault and what was expected.
    """
    _check_prompt(input_ids, attention_mask)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
    if eos_token_ids is None:
        eos_token_ids = own_eos(target)
    ends = {eos_token_ids} if isinstance(eos_token_ids, int) else set(eos_token_ids)
    generator = None if seed is None else torch.Generator(target.device).manual_seed(seed)
    sampling = Sampling(temperature, top_k, top_p)
    proposer = make_proposer(draft, tree, temperature, generator)
    input_ids = input_ids.to(target.device, torch.int64)
    prompts = _prompts(input_ids, attention_mask)
    texts = [prompt.tolist() for prompt in prompts] if stop_strings else []
    stopping = Stopping(max_new_tokens, ends, stop_strings, target.tokenizer, texts)
    make = with_custom(processors_of(target, generation_config, sorted(ends), max_new_tokens), logits_processor)
    decoding = _Decoding(target, proposer, sampling, generator, stopping, PathProcessors(make, prompts), prompts)
    return _blocks(decoding, input_ids, attention_mask)


def own_eos(target: "Target") -> list[int]:
    """The tokens at which the target's own generation ends."""
    ids = target.model.generation_config.eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _check_prompt(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        kind = f"of {input_ids.dtype}" if isinstance(input_ids, Tensor) else f"a {type(input_ids).__name__}"
        raise ValueError(f"input_ids is {kind}; expected a tensor of token ids, int64, [rows, tokens]")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [rows, tokens], at least one of each")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected {list(input_ids.shape)} as input_ids"
        )
    empty = (attention_mask.bool().sum(1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"attention_mask leaves no token in rows {empty}")


def _blocks(decoding: "_Decoding", input_ids: Tensor, attention_mask: Tensor | None) -> Iterator[Block]:
    yield Block(decoding.prefill(input_ids, attention_mask), decoding.output)
    while decoding.active:
        yield Block(decoding.step(), decoding.output)


class _Decoding:
    """One batch being decoded. `active` are the rows that have not ended, `roots` [B] their last emitted tokens."""

    def __init__(
        self,
        target: "Target",
        proposer: Proposer | None,
        sampling: Sampling,
        generator: torch.Generator | None,
        stopping: Stopping,
        processors: PathProcessors,
        prompts: list[Tensor],
    ):
        self.target = target
        self.proposer = proposer
        self.max_new_tokens = stopping.max_new_tokens
        self.sampling = sampling
        self.generator = generator
        self.stopping = stopping
        self.processors = None if processors.is_empty else processors
        self.prompts = prompts
        self.output = GenerateOutput(tokens=[])

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
        """Reads the prompts and emits the first token of each row."""
        started = perf_counter()
        batch = len(input_ids)
        self.output.tokens = [[] for _ in range(batch)]
        self.output.rows = [RowStats() for _ in range(batch)]
        self.output.timings = dict.fromkeys(["prefill_s", "propose_s", "verify_s", "commit_s"], 0.0)
        self.active = list(range(batch))
        self.state = self.target.prefill(input_ids, attention_mask)
        logits = self._processed(self.state.last_logits[:, None], input_ids[:, :1], root_tree())
        self.roots = self.sampling.draw(logits[:, 0], self.generator)
        new = self._emit([[token] for token in self.roots.tolist()])
        if self._room() > 0 and self.proposer is not None:
            compact = pad_sequence(self.prompts, batch_first=True)  # from the left, as the features of the state are
            self.proposer.start(compact, list(self.state.lengths), self.state.features, self.roots)
        self.state.features = self.state.features.new_empty(0)  # [B, T, D], of no use from here on
        self.output.timings["prefill_s"] = perf_counter() - started
        return new

    @torch.no_grad()
    def step(self) -> list[list[int]]:
        """One target forward: the tokens it emits for each row."""
        marks = [perf_counter()]
        # A forward that keeps d drafts emits d + 1 tokens.
        allowed = self.max_new_tokens - min(len(self.output.tokens[b]) for b in self.active) - 1
        depth = min(allowed, self._room())
        proposal = self.proposer.propose(depth) if self.proposer is not None and depth > 0 else None
        marks.append(perf_counter())
        if proposal is None or proposal.tree.num_nodes == 1:
            tokens, depth, is_committed = self.roots[:, None], 0, True
            out = self.target.step(self.state, self.roots)
            logits = self._processed(out.logits, tokens, root_tree())
            drawn = self.sampling.draw(logits[:, 0], self.generator).tolist()
            kept = Acceptance([[0] for _ in drawn], [[token] for token in drawn], [False for _ in drawn])
        else:
            tokens, depth, is_committed = proposal.tokens, proposal.tree.max_depth, False
            out = self.target.verify(self.state, tokens, proposal.tree)
            logits = self._processed(out.logits, tokens, proposal.tree)
            if self.sampling.is_greedy:
                kept = verify_greedy(logits, tokens, proposal.tree)
            elif proposal.draws is not None:
                kept = verify_drawn(logits, tokens, proposal.tree, proposal.draws, self.sampling, self.generator)
            else:
                kept = verify_sampled(logits, tokens, proposal.tree, self.sampling, self.generator)
        marks.append(perf_counter())
        self.output.steps += 1
        forwarded = self.active
        new = self._emit(kept.emitted)
        for b in forwarded:
            is_cut = len(new[b]) < len(kept.emitted[b])
            accepted = len(new[b]) if is_cut else len(new[b]) - 1
            self.output.rows[b].forwards.append(
                ForwardStats(len(new[b]), accepted, depth, kept.missed[b] and not is_cut)
            )
        if self.active:
            if isinstance(self.proposer, LogitsReader):
                self.proposer.read_logits(out.logits)
            self._advance(tokens, out.features, kept, is_committed)
        marks.append(perf_counter())
        for name, start, end in zip(("propose_s", "verify_s", "commit_s"), marks, marks[1:], strict=False):
            self.output.timings[name] += end - start
        return new

    def _advance(self, tokens: Tensor, features: Tensor, kept: Acceptance, is_committed: bool) -> None:
        """Commits the kept paths of the rows that go on, in the target and in the draft."""
        paths = [path if b in self.active else [] for b, path in enumerate(kept.paths)]
        if not is_committed:
            self.target.commit(self.state, paths)
        self.roots = send([emitted[-1] for emitted in kept.emitted], tokens.device)
        if self._room() > 0 and self.proposer is not None:
            self.proposer.advance(tokens, features, paths, self.roots)

    def _processed(self, logits: Tensor, tokens: Tensor, tree: Tree) -> Tensor:
        """`logits` [B, n, V] as the processors leave them; as they are where there are none."""
        if self.processors is None:
            return logits
        return self.processors(logits, self.output.tokens, self.active, tokens, tree)

    def _emit(self, blocks: list[list[int]]) -> list[list[int]]:
        """Appends each active row's block, cut where the row ends; ended rows leave `active`."""
        new: list[list[int]] = [[] for _ in blocks]
        ended = set()
        for b in self.active:
            if blocks[b][-1] < 0:
                count = len(self.output.tokens[b])
                raise ValueError(f"row {b}: the target's logits after {count} new tokens are not numbers")
            new[b], is_end = self.stopping.cut(b, self.output.tokens[b], blocks[b])
            self.output.tokens[b] += new[b]
            if is_end:
                ended.add(b)
        self.active = [b for b in self.active if b not in ended]
        return new

    def _room(self) -> int:
        """Levels of drafts that the draft has positions for; drops it, with a notice, when there are none."""
        bound = None if self.proposer is None else self.proposer.max_length
        if bound is None or not self.active:
            return self.max_new_tokens
        context = max(self.state.lengths[b] for b in self.active)
        if context >= bound:
            logger.warning("the context, %d tokens, has passed the draft's %d: going on without drafts", context, bound)
            self.proposer = None
        return max(bound - context, 0)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Every row's real tokens."""
    if attention_mask is None:
        return list(input_ids)
    return [ids[mask] for ids, mask in zip(input_ids, attention_mask.to(input_ids.device).bool(), strict=True)]
