"""What is done with the turns of a conversation: one stated policy, every change counted.

A conversation leaves here as messages that alternate: an optional system message, then user and assistant in turn, the
last one the assistant's. Words are the assistant's only if an assistant role said them.
"""

from collections import Counter
from dataclasses import dataclass, fields
from typing import Literal, TypedDict, get_args

from draftwood.train.conversations import RowError


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class TurnPolicy:
    """How odd turns are handled. Roles are compared in lower case.

    Always: blank turns are dropped, assistant turns before the first user turn are dropped, user turns after the last
    reply are dropped, a row that is left without a reply is dropped. A system turn that is not at the start goes in
    front of the next user turn's text unless `system` is "drop".

    user_roles, assistant_roles, system_roles: the names that count as each; any other role is unknown. `bing`, `bard`
        and `tool` are unknown on purpose: their words are not what an assistant is trained on.
    unknown_role: "cut" ends the conversation before the first unknown turn; "drop_turn" leaves the turn out;
        "drop_row" drops the row.
    same_role: two turns of one role in a row: "merge" joins them by a blank line; "cut" ends before the second.
    system: "keep" as a system message; "fold" into the first user turn; "drop".
    template_without_system: the same for a template that knows no system role and `system` "keep": "fold" or "drop".
    unstable_template: a row whose replies are rendered differently once the conversation goes on (history rewritten,
        another ending for the last message): "drop_row", or "last_reply" to train on its last reply alone.
    duplicates: a row that repeats an earlier one word for word: "drop" or "keep".
    """

    user_roles: tuple[str, ...] = ("human", "user")
    assistant_roles: tuple[str, ...] = ("gpt", "chatgpt", "assistant", "model")
    system_roles: tuple[str, ...] = ("system", "developer")
    unknown_role: Literal["cut", "drop_turn", "drop_row"] = "cut"
    same_role: Literal["merge", "cut"] = "merge"
    system: Literal["keep", "fold", "drop"] = "keep"
    template_without_system: Literal["fold", "drop"] = "fold"
    unstable_template: Literal["drop_row", "last_reply"] = "drop_row"
    duplicates: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        for field in fields(self):
            allowed = get_args(field.type)
            value = getattr(self, field.name)
            if field.name.endswith("_roles"):
                object.__setattr__(self, field.name, tuple(role.lower() for role in value))
            elif value not in allowed:
                raise ValueError(f"{field.name} is {value!r}, expected one of {', '.join(map(repr, allowed))}")
        roles = Counter(self.user_roles + self.assistant_roles + self.system_roles)
        if twice := [role for role, count in roles.items() if count > 1]:
            raise ValueError(f"the role {twice[0]!r} is listed twice in the turn policy")

    def kind(self, role: str) -> str | None:
        """ "user", "assistant", "system", or None for an unknown role."""
        role = role.strip().lower()
        for kind, names in (
            ("user", self.user_roles),
            ("assistant", self.assistant_roles),
            ("system", self.system_roles),
        ):
            if role in names:
                return kind
        return None


def normalise_turns(turns: list[tuple[str, str]], policy: TurnPolicy) -> tuple[list[Message], Counter[str]]:
    """Alternating messages from turns as written, and how often each kind of change was made.

    Changes: `blank_turn_dropped`, `leading_reply_dropped`, `unknown_role_cut`, `unknown_role_dropped`,
    `same_role_merged`, `same_role_cut`, `system_folded`, `system_dropped`, `unanswered_turn_dropped`.

    Raises:
        RowError: `empty` (no turns), `unknown_role` (under "drop_row"), `no_reply` (no reply to a user is left).
    """
    if not turns:
        raise RowError("empty", "the conversation has no turns")
    changes: Counter[str] = Counter()
    messages: list[Message] = []
    system_text = ""
    for role, text in turns:
        kind = policy.kind(role)
        if not text.strip():
            changes["blank_turn_dropped"] += 1
        elif kind is None:
            if policy.unknown_role == "drop_row":
                raise RowError("unknown_role", f"the role {role!r} is none of the policy's")
            if policy.unknown_role == "cut":
                changes["unknown_role_cut"] += 1
                break
            changes["unknown_role_dropped"] += 1
        elif kind == "system":
            if policy.system == "drop":
                changes["system_dropped"] += 1
            elif policy.system == "keep" and not messages:
                messages.append(Message(role="system", content=text))
            else:
                system_text = _join(system_text, text)
        elif kind == "assistant" and all(message["role"] == "system" for message in messages):
            changes["leading_reply_dropped"] += 1
        elif messages and messages[-1]["role"] == kind and policy.same_role == "cut":
            changes["same_role_cut"] += 1
            break
        else:
            if system_text and kind == "user":
                text, system_text = _join(system_text, text), ""
                changes["system_folded"] += 1
            if messages and messages[-1]["role"] == kind:
                changes["same_role_merged"] += 1
                messages[-1]["content"] = _join(messages[-1]["content"], text)
            else:
                messages.append(Message(role=kind, content=text))
    if system_text:
        changes["system_dropped"] += 1
    if messages and messages[-1]["role"] == "user":
        messages.pop()
        changes["unanswered_turn_dropped"] += 1
    if not messages or messages[-1]["role"] != "assistant":
        raise RowError("no_reply", "no reply to a user turn is left")
    return messages, changes


def _join(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first else second
