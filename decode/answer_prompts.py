"""The prompts of a file answered into a file of answers, a JSON object a line.

    answer_prompts(target, draft, "prompts.jsonl", "answers.jsonl", tree="dynamic-16")

A line appears when its answer has ended, so batches are written in the order in which they end:

    id, row        of the prompt: its name, and its line or entry in the file, from 1
    turn           from 1; the answers before it are in its prompt
    prompt, text   of the user and of the target; a stop string stands with the token that completes it
    new_tokens     EOS included
    acceptance_length   tokens per target forward after prefill; null where there was none
    tokens_per_s   from the start of the batch to the end of the answer
    finish_reason  eos, stop_string, length (max_new_tokens), or too_long: prompt and max_new_tokens do not fit into the
                   target's positions, so neither this turn nor a later one of its conversation has a text

Killed and started again it goes on where it was. A batch that is gone on with is drawn anew as a whole where the
temperature is above 0, and its seed depends on what is in it alone: a resumed run writes what an unbroken one would.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from draftwood.decode.answer_file import AnswerFile
from draftwood.decode.answers import Answer, answer_batch, batch_seed
from draftwood.decode.certificate import hash_tensors
from draftwood.decode.prompts import Conversation, encode_messages, has_room, read_conversations
from draftwood.decode.propose import Lookahead, Lookup, Plan, Proposer, TreeSpec, make_proposer, resolve_tree
from draftwood.decode.verify import Sampling
from draftwood.models.fingerprint import fingerprint, tokenizer_settings

if TYPE_CHECKING:
    from draftwood.decode.propose.base import Drafter
    from draftwood.models.target import Target

TOO_LONG = "too_long"
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@dataclass
class Answered:
    """The account.

    reasons: answers in the file by why they end. num_earlier: how many of them are of earlier runs. new_tokens,
    seconds: of this run. emitted, forwards: after the first token of each answer; their ratio is the acceptance length.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    num_earlier: int = 0
    new_tokens: int = 0
    emitted: int = 0
    forwards: int = 0
    seconds: float = 0.0
    is_finished: bool = False

    def summary(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items()))
        earlier = f", {self.num_earlier} of an earlier run" if self.num_earlier else ""
        figures = f"; {self.new_tokens} tokens, {self.new_tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        length = f"; acceptance length {self.emitted / self.forwards:.2f}" if self.forwards else ""
        return f"{self.reasons.total()} answers ({reasons or 'none'}){earlier}{figures}{length}"


@dataclass
class _Talk:
    """A conversation being answered: its messages so far."""

    conversation: Conversation
    messages: list[dict[str, str]]
    is_too_long: bool = False


def answer_prompts(
    target: "Target",
    draft: "Drafter | Proposer | None",
    prompts: str | Path,
    out: str | Path,
    *,
    tree: TreeSpec = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_strings: Sequence[str] = (),
    batch_size: int = 1,
    num_prompts: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Answered:
    """Appends to `out` what of `prompts` is not answered there yet; Ctrl-C ends it and keeps what is written.

    Args:
        prompts: as `read_conversations` takes it; every turn is answered.
        draft, tree, max_new_tokens, temperature, top_k, top_p, stop_strings: as `generate`.
        batch_size: conversations answered together, in the order of the file.
        num_prompts: only so many lines or entries, from the start.
        seed: of the sampling.
        console: for progress; None is stderr.

    Raises:
        ValueError: the target has no tokenizer, a prompt or setting is at fault, or `out` was begun with others.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer: it can't turn prompts into tokens")
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens), ("num_prompts", num_prompts)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    Sampling(temperature, top_k, top_p)
    make_proposer(draft, tree, temperature)
    conversations = list(islice(read_conversations(prompts), num_prompts))
    if not conversations:
        raise ValueError(f"{prompts}: no prompt in it")
    for conversation in conversations:  # before anything is decoded
        try:
            encode_messages(target.tokenizer, conversation.messages)
        except ValueError as error:
            raise ValueError(f"{prompts}, row {conversation.row}: {error}") from None
    settings: dict[str, Any] = {
        "target": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        **tokenizer_settings(target.tokenizer),
        **_drafting(draft, tree),
        "prompts_sha256": sha256(Path(prompts).read_bytes()).hexdigest(),
        "max_new_tokens": max_new_tokens,
        "stop_strings": list(stop_strings),
        "temperature": temperature,
    }
    if temperature:
        # What a draw depends on beside the above.
        settings |= {"top_k": top_k, "top_p": top_p, "seed": seed, "batch_size": batch_size, "num_prompts": num_prompts}
    sampling = dict(tree=tree, temperature=temperature, top_k=top_k, top_p=top_p)
    decoding = dict(max_new_tokens=max_new_tokens, stop_strings=stop_strings, **sampling)
    with (
        AnswerFile(Path(out), settings, _keep) as file,
        Progress(*_COLUMNS, console=console or Console(stderr=True)) as bar,
    ):
        run = _Run(target, draft, file, bar, decoding, seed, sum(1 + len(c.later) for c in conversations))
        try:
            for start in range(0, len(conversations), batch_size):
                run.answer(conversations[start : start + batch_size])
            run.account.is_finished = True
        except KeyboardInterrupt:
            pass
    return run.account


class _Run:
    """Answers batches of conversations into the file."""

    def __init__(
        self,
        target: "Target",
        draft: "Drafter | Proposer | None",
        file: AnswerFile,
        bar: Progress,
        decoding: dict[str, Any],
        seed: int,
        total: int,
    ):
        self.target, self.draft, self.file, self.bar = target, draft, file, bar
        self.decoding, self.seed = decoding, seed
        self.done = {(line["row"], line["turn"]) for line in file.lines}
        self.account = Answered(Counter(line["finish_reason"] for line in file.lines), len(file.lines))
        self.task = bar.add_task("Answering", total=total, completed=len(self.done))

    def answer(self, batch: list[Conversation]) -> None:
        missing = [c for c in batch if not all((c.row, turn) in self.done for turn in range(1, 2 + len(c.later)))]
        if not missing:
            return
        talks = [_Talk(c, list(c.messages)) for c in (batch if self.decoding["temperature"] else missing)]
        for turn in range(1, 2 + max(len(talk.conversation.later) for talk in talks)):
            self._answer_turn([talk for talk in talks if turn < 2 + len(talk.conversation.later)], turn)

    def _answer_turn(self, talks: list[_Talk], turn: int) -> None:
        asked: list[tuple[_Talk, Tensor]] = []
        for talk in talks:
            if turn > 1:
                talk.messages.append({"role": "user", "content": talk.conversation.later[turn - 2]})
            if not talk.is_too_long:
                ids = encode_messages(self.target.tokenizer, talk.messages)
                talk.is_too_long = not has_room(self.target, ids, self.decoding["max_new_tokens"])
                asked.append((talk, ids))
            if talk.is_too_long:
                self._write(talk, turn, None)
        asked = [(talk, ids) for talk, ids in asked if not talk.is_too_long]
        if not asked:
            return

        started = self.account.seconds

        def write(row: int, answer: Answer) -> None:
            talk, account = asked[row][0], self.account
            account.new_tokens += len(answer.tokens)
            account.emitted += answer.stats.emitted
            account.forwards += len(answer.stats.forwards)
            account.seconds = started + answer.seconds
            self._write(talk, turn, answer)
            talk.messages.append({"role": "assistant", "content": answer.text})

        answer_batch(
            self.target,
            self.draft,
            [ids for _, ids in asked],
            seed=batch_seed(self.seed, turn, [talk.conversation.row for talk, _ in asked]),
            on_answer=write,
            **self.decoding,
        )

    def _write(self, talk: _Talk, turn: int, answer: Answer | None) -> None:
        """Adds the line, unless an earlier run did; None: the prompt is too long."""
        key = (talk.conversation.row, turn)
        if key in self.done:
            return
        self.done.add(key)
        line = {"id": talk.conversation.name, "row": key[0], "turn": turn, "prompt": talk.messages[-1]["content"]}
        self.file.append(line | _result(answer))
        self.account.reasons[TOO_LONG if answer is None else answer.finish_reason] += 1
        account, progress = self.account, "Answering"
        if account.forwards:
            progress += f", {account.emitted / account.forwards:.2f} tokens per step"
            progress += f", {account.new_tokens / account.seconds:.1f} tokens/s"
        self.bar.update(self.task, completed=len(self.done), description=progress)


def _result(answer: Answer | None) -> dict[str, Any]:
    if answer is None:
        reason, text, tokens, length, speed = TOO_LONG, None, 0, None, None
    else:
        reason, text, tokens = answer.finish_reason, answer.text, len(answer.tokens)
        length = round(answer.stats.acceptance_length, 4) if answer.stats.forwards else None
        speed = round(tokens / answer.seconds, 2)
    return {
        "text": text,
        "new_tokens": tokens,
        "acceptance_length": length,
        "tokens_per_s": speed,
        "finish_reason": reason,
    }


def _drafting(draft: Any, tree: TreeSpec) -> dict[str, Any]:
    """What names the draft and its tree: they decide the acceptance in every line."""
    if isinstance(draft, Proposer):
        return {"draft": type(draft).__name__, "tree": None}
    settings = resolve_tree(tree)
    needs_none = isinstance(settings, Lookup | Lookahead)
    if draft is None and not needs_none:
        return {"draft": None, "tree": None}
    weights = None if needs_none else hash_tensors(dict(draft.state_dict()))
    return {"draft": weights, "tree": f"plan {settings}" if isinstance(tree, Plan) else str(settings)}


def _keep(line: Any) -> dict[str, Any]:
    return {key: line[key] for key in ("row", "turn", "finish_reason")}
