"""One answer as its client sees it, in a form in which two of them can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Answer", "Heard", "difference"]

Answer = dict[str, Any]
"""By the name of what must be equal."""


@dataclass(slots=True)
class _Choice:
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish: str | None = None
    stop: Any = None
    begun: bool = False


class Heard:
    """What has come so far. `end` tells how it ended: empty until then."""

    def __init__(self) -> None:
        self.end = ""
        """done; error: as an event; or what was wrong with it."""
        self.error = ""
        self.pieces = 0
        """Events that had a part of the answer."""
        self._choices: dict[int, _Choice] = {}
        self._prompt_token_ids: list[int] | None = None
        self._usage: list[int] | None = None
        self._name: tuple[Any, Any] | None = None
        self._over = False  # an error event is followed by [DONE], once

    @property
    def text(self) -> str:
        return self._choices[0].text if 0 in self._choices else ""

    def answer(self) -> Answer:
        found: Answer = {"prompt_token_ids": self._prompt_token_ids, "usage": self._usage}
        for index, choice in sorted(self._choices.items()):
            for name in ("token_ids", "text", "reasoning", "finish", "stop"):
                found[f"choice {index} {name}"] = getattr(choice, name)
            for at, call in sorted(choice.calls.items()):
                (
                    found[f"choice {index} call {at} name"],
                    found[f"choice {index} call {at} arguments"],
                ) = call
            for name, values in sorted(choice.logprobs.items()):
                found[f"choice {index} logprobs.{name}"] = values
        return found

    def line(self, line: bytes) -> bool:
        """A line of a stream; whether it has told something of the answer."""
        if not line.startswith(b"data: "):
            return False
        over = line.startswith(b"data: [DONE]")
        if over and self.end == "error" and not self._over:
            self._over = True
            return False
        if self.end:
            self.end = f"wrong: {line[:80]!r} came behind the end ({self.end})"
            return False
        if over:
            unended = [index for index, choice in self._choices.items() if choice.finish is None]
            self.end = (
                f"wrong: [DONE] before the end of choices {unended}"
                if unended or not self._choices
                else "done"
            )
            return False
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            self.end, self.error = "error", event["error"]["message"]
            return False
        return self._take(event, "delta")

    def whole(self, body: bytes) -> None:
        self._take(msgspec.json.decode(body), "message")
        self.end = self.end or "done"

    def _take(self, event: dict[str, Any], part: str) -> bool:
        name = (event["id"], event["created"])
        self._name = self._name or name
        if name != self._name:
            self.end = f"wrong: it changes from {self._name} to {name}"
        if event.get("usage"):
            usage = [event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]]
            if self._usage is not None:
                self.end = f"wrong: usage comes twice: {self._usage}, {usage}"
            self._usage = usage
        before = self.pieces
        for each in event["choices"]:
            said = each[part] if part in each else {"content": each["text"]}
            self._said(self._choices.setdefault(each["index"], _Choice()), each, said)
        return self.pieces > before

    def _said(self, choice: _Choice, each: dict[str, Any], said: dict[str, Any]) -> None:
        ids, finish = each.get("token_ids") or [], each.get("finish_reason")
        says = bool(
            said.get("content") or said.get("reasoning_content") or said.get("tool_calls") or ids
        )
        if choice.finish is not None and (says or finish):
            self.end = f"wrong: choice {each['index']} goes on behind its end"
        if said.get("role"):
            if choice.begun:
                self.end = f"wrong: choice {each['index']} begins twice"
            choice.begun = True
        choice.text += said.get("content") or ""
        choice.reasoning += said.get("reasoning_content") or ""
        choice.token_ids += ids
        for at, call in enumerate(said.get("tool_calls") or []):
            known = choice.calls.setdefault(call.get("index", at), ["", ""])
            function = call.get("function") or {}
            if known[0] and function.get("name"):
                self.end = f"wrong: a call of {known[0]} is named twice"
            known[0] += function.get("name") or ""
            known[1] += function.get("arguments") or ""
        for name, values in (each.get("logprobs") or {}).items():
            if isinstance(values, list):
                choice.logprobs.setdefault(name, []).extend(values)
        if each.get("prompt_token_ids") is not None:
            self._prompt_token_ids = each["prompt_token_ids"]
        choice.finish = choice.finish or finish
        choice.stop = each.get("stop_reason") if finish else choice.stop
        self.pieces += says


def difference(twin: Answer, answer: Answer, *, ended: bool = True) -> str:
    """Where an answer differs from its twin first; empty if nowhere. One that has not `ended` may
    lack the rest of its twin, but nothing else.
    """
    for name in twin | answer:
        wanted, got = twin.get(name), answer.get(name)
        if not ended and isinstance(wanted, list | str) and isinstance(got, list | str):
            wanted = wanted[: len(got)]
        if wanted == got or (got is None and not ended):
            continue
        if isinstance(wanted, list | str) and isinstance(got, list | str):
            same = next(
                (at for at, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None
            )
            at = min(len(wanted), len(got)) if same is None else same
            sizes = f"{len(got)} instead of {len(wanted)} long, " if len(got) != len(wanted) else ""
            return (
                f"{name}: {sizes}other from {at} on: {got[at : at + 8]!r}, not "
                f"{wanted[at : at + 8]!r}"
            )
        return f"{name}: {got!r}, not {wanted!r}"
    return ""
