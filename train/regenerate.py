"""Self-distillation data: the target answers the prompts of conversations itself, turn by turn.

    regenerate(target, "sharegpt", "own.jsonl", draft=draft)     # then: prepare("own.jsonl", ...)

Of a conversation the system text and the user's turns are taken; each answer is the target's own and stands before the
next turn. The file has a ShareGPT-style line per conversation that the target was asked, in batches of similar ones:
`source`, `source_row`, and in `stopped` why a conversation ends before its last turn, null if it does not:

    too_long        the next prompt and `max_new_tokens` do not fit into `max_length`
    unfinished      the last answer reached `max_new_tokens`; it stands as it is
    blank_answer    the target said nothing
    template_error  the chat template refuses the messages

Killed and started again it goes on where it was. At temperature 0 neither that, nor the batch size, nor a draft changes
the text (but for ties in the target's own rounding). Above 0 the seed of a batch depends on what is in it alone: a
resumed run writes what an unbroken one would.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftwood.decode.answer_file import AnswerFile
from draftwood.decode.answers import EOS, answer_batch, batch_seed
from draftwood.models.draft import max_length as max_positions
from draftwood.models.fingerprint import fingerprint, tokenizer_settings
from draftwood.models.target import Target
from draftwood.train.conversations import RowError
from draftwood.train.report import ABOUT
from draftwood.train.rows import RowBuilder
from draftwood.train.sources import SourceLike, open_sources
from draftwood.train.talks import Talk, batches, read_talks
from draftwood.train.turns import Message, TurnPolicy

_STOPS = {
    "too_long": "ended by a prompt that is too long",
    "unfinished": "ended by an answer cut at max_new_tokens",
    "blank_answer": "ended by a blank answer",
    "template_error": "refused by the chat template",
}


@dataclass
class Regenerated:
    """The account: once `is_finished`, every entry of the sources is a line or dropped for a reason.

    num_answers: in all lines. num_earlier: lines of an earlier run. stopped: lines that end early, by reason. tokens,
    forwards: of this run, after the first token of each answer: their ratio is the acceptance length.
    """

    num_lines: int = 0
    num_earlier: int = 0
    num_answers: int = 0
    tokens: int = 0
    forwards: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    is_finished: bool = False

    @property
    def num_rows(self) -> int:
        """Entries of the sources that are done with."""
        return self.num_lines + self.dropped.total()

    def add(self, stopped: str | None, num_answers: int) -> None:
        self.num_lines += 1
        self.num_answers += num_answers
        if stopped is not None:
            self.stopped[stopped] += 1

    def __rich__(self) -> Table:
        table = Table(title="Answered by the target", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("conversations", f"{self.num_lines:,}")
        for reason, count in self.stopped.most_common():
            table.add_row(f"  {_STOPS.get(reason, reason)}", f"{count:,}")
        for reason, count in self.dropped.most_common():
            table.add_row(f"dropped: {ABOUT.get(reason, reason)}", f"{count:,}")
        table.add_section()
        table.add_row("in the sources" if self.is_finished else "done so far", f"{self.num_rows:,}")
        table.add_row("answers", f"{self.num_answers:,}")
        if self.forwards:
            table.add_row("acceptance length", f"{self.tokens / self.forwards:.2f}")
        return table


def regenerate(
    target: Target,
    source: SourceLike | Sequence[SourceLike],
    out: str | Path,
    *,
    draft: Any = None,
    tree: Any = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    max_new_tokens: int = 512,
    max_length: int = 2048,
    batch_size: int = 8,
    limit: int | None = None,
    seed: int = 0,
    policy: TurnPolicy | None = None,
    console: Console | None = None,
) -> Regenerated:
    """Appends to the JSON Lines file `out` what is not answered there yet.

    Ctrl-C ends it between two batches' lines and keeps what is written: then `is_finished` is false.

    Args:
        source: one or several, see `sources.py`; of weights above 1 nothing is repeated.
        draft, tree: as `generate` takes them; None: without.
        temperature, top_p: of the sampling; 0 is greedy.
        max_new_tokens: of an answer. max_length: of a conversation, as tokens.
        batch_size: conversations answered together.
        limit: only the first so many entries of each source.
        policy: of odd turns; the assistant's words are not looked at.
        console: for progress; None is stderr.

    Raises:
        ValueError: a source or setting that is at fault, or `out` was begun with other settings.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer: answers can't be written as text")
    if batch_size < 1 or not 1 <= max_new_tokens < max_length:
        raise ValueError(
            f"batch_size is {batch_size}, max_new_tokens {max_new_tokens} and max_length {max_length}; expected at "
            "least 1, and room for a prompt beside the answer"
        )
    context = max_positions(target)
    if context is not None and max_length > context:
        raise ValueError(f"max_length is {max_length}, but {target.name} has positions for {context} tokens")
    sources, policy = open_sources(source), policy or TurnPolicy()
    build = RowBuilder(target.tokenizer, max_length=max_length, policy=policy)
    answer = _Answerer(target, draft, tree, build, temperature, top_p, max_new_tokens, seed)
    settings = {
        "target": fingerprint(target),
        **tokenizer_settings(target.tokenizer),
        "source_sha256": [[one.sha256(), one.weight] for one in sources],
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "max_length": max_length,
        "system": policy.system,
    }
    if temperature:
        # What a draw depends on beside the above.
        what = None if draft is None else type(draft).__name__
        settings |= {"top_p": top_p, "seed": seed, "batch_size": batch_size, "limit": limit, "draft": what}
        settings |= {"tree": None if draft is None else str(tree)}
    account = answer.account
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        AnswerFile(Path(out), settings, _keep) as file,
        Progress(*columns, console=console or Console(stderr=True)) as bar,
    ):
        done = {(line["source"], line["source_row"]) for line in file.lines}
        for line in file.lines:
            account.add(line["stopped"], line["num_answers"])
        account.num_earlier = account.num_lines
        try:
            task = bar.add_task("Answering", total=sum(1 for one in sources for _ in islice(one.rows(), limit)))
            started = time.perf_counter()
            for batch in batches(read_talks(sources, policy, limit, seed, account.dropped), batch_size):
                missing = [talk for talk in batch if talk.key not in done]
                if missing:
                    answer(batch if temperature else missing)
                for talk in missing:
                    file.append(talk.line())
                    account.add(talk.stopped, sum(message["role"] == "assistant" for message in talk.messages))
                rate = account.tokens / (time.perf_counter() - started)
                bar.update(task, completed=account.num_rows, description=f"Answering, {rate:.0f} tokens/s")
            account.is_finished = True
        except KeyboardInterrupt:
            pass
    return account


@dataclass
class _Answerer:
    """Answers a batch of talks to their ends."""

    target: Target
    draft: Any
    tree: Any
    build: RowBuilder
    temperature: float
    top_p: float | None
    max_new_tokens: int
    seed: int
    account: Regenerated = field(default_factory=Regenerated)

    def __call__(self, talks: list[Talk]) -> None:
        turn = 0
        while active := [talk for talk in talks if talk.is_active]:
            prompts: list[tuple[Talk, list[int]]] = []
            for talk in active:
                talk.messages.append(Message(role="user", content=talk.turns.pop(0)))
                try:
                    ids = self.build.prompt_ids(talk.messages)
                except RowError as error:
                    talk.stopped = error.reason
                    continue
                if len(ids) + self.max_new_tokens > self.build.max_length:
                    talk.stopped = "too_long"
                else:
                    prompts.append((talk, ids))
            if prompts:
                self._answer_turn(prompts, turn)
            turn += 1

    def _answer_turn(self, prompts: list[tuple[Talk, list[int]]], turn: int) -> None:
        answers = answer_batch(
            self.target,
            self.draft,
            [torch.tensor([ids]) for _, ids in prompts],
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tree=self.tree,
            seed=batch_seed(self.seed, turn, [talk.key for talk, _ in prompts]),
        )
        for (talk, _), answer in zip(prompts, answers, strict=True):
            self.account.tokens += answer.stats.emitted
            self.account.forwards += len(answer.stats.forwards)
            if not answer.text.strip():
                talk.stopped = "blank_answer"
                continue
            talk.messages.append(Message(role="assistant", content=answer.text))
            if answer.finish_reason != EOS:
                talk.stopped = "unfinished"


def _keep(line: Any) -> dict[str, Any]:
    """What the account needs of a line, without the answers."""
    answers = sum(turn["from"] == "gpt" for turn in line["conversations"])
    return {**{key: line[key] for key in ("source", "source_row", "stopped")}, "num_answers": answers}
