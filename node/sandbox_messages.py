"""Messages between a node and its sandbox process, as msgpack behind a length of eight bytes; and
its limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvrelay.wire.sampling import Constraint

__all__ = [
    "GRAMMAR",
    "LENGTH_BYTES",
    "PROMPT",
    "Answer",
    "Broke",
    "Compile",
    "Compiled",
    "Limits",
    "Refused",
    "Setup",
    "Tokenize",
    "Tokenized",
    "Work",
    "framed",
]

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one child. Memory is what it may take beside what it begins with."""

    cpu_s: int
    memory_bytes: int
    stack_bytes: int

    def __str__(self) -> str:
        memory, stack = self.memory_bytes >> 20, self.stack_bytes >> 20
        return f"{self.cpu_s} s of CPU time, {memory} MiB of memory and {stack} MiB of stack"


# A schema of 1,000 properties takes 0.2 s and 14 MiB, with the answers that are tried. The engine
# compiles what passes here with 8 times the stack.
GRAMMAR = Limits(cpu_s=2, memory_bytes=256 << 20, stack_bytes=2 << 20)
# Tokenizing takes about 1 us and 60 bytes of memory per byte of text.
PROMPT = Limits(cpu_s=10, memory_bytes=1 << 30, stack_bytes=8 << 20)


class Setup(msgspec.Struct, frozen=True):
    """The first message: the model's tokenizer, and what prompts and grammars need beside it."""

    model: str
    chat_template: str | None
    """The operator's; None takes the model's."""
    trusts_request_templates: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    tool_call_parser: str = "hermes"
    """The name of a row of the table, or none."""
    tool_parser_plugin: str = ""
    """The operator's file with further rows; empty: none."""


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """The body of a chat or of a completion, whose prompts are wanted as token ids. `fits`: the
    context.
    """

    chat: bool
    body: bytes
    fits: bool = True


class Compile(msgspec.Struct, frozen=True, tag=True):
    """A constraint, which is wanted as one Lark grammar that compiles."""

    constraint: Constraint


Work = Tokenize | Compile


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """The token ids of each prompt."""

    prompts: list[list[int]]


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The same constraint as a Lark grammar."""

    constraint: Constraint


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A RequestError."""

    message: str
    param: str | None
    code: str | None


class Broke(msgspec.Struct, frozen=True, tag=True):
    """An error of ours, with its traceback."""

    traceback: str


Answer = Tokenized | Compiled | Refused | Broke


def framed(message: bytes) -> bytes:
    """Put its length before a message."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message
