"""What the processes of the client tell each other: msgpack behind its length, over pipes.

Seconds count from the begin of the run, a time on the machine's monotonic clock.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvrelay.load.sessions import Arrival, Spelling, Work

__all__ = [
    "Asking",
    "Failure",
    "Load",
    "Progress",
    "Record",
    "Share",
    "ProcessReport",
    "pack",
    "size_of",
]

_SIZE_BYTES = 4


class Failure(StrEnum):
    """Why a request has no good answer; CUT: the run was over, CLIENT: the client's own fault."""

    CONNECT = "no connection"
    STATUS = "HTTP status"
    IN_BAND = "error in the stream"
    EARLY_END = "early end"
    EMPTY = "empty answer"
    SHORT = "fewer tokens than asked"
    MALFORMED = "malformed"
    DEADLINE = "deadline"
    UNSENT = "a turn before it failed"
    CUT = "cut at the end"
    CLIENT = "the client's own"


class Asking(msgspec.Struct, frozen=True):
    """How requests are put: where, to which model, with which fields."""

    url: str
    api_key: str
    model: str
    chat: bool
    spelling: Spelling
    vocab_size: int = 32_000
    ignore_eos: bool = True
    usage_per_chunk: bool = False
    deadline_s: float = 600.0
    others: list[str] = []
    """Servers that are asked in turn with `url`, session by session."""
    headers: dict[str, str] = {}


class Load(msgspec.Struct, frozen=True):
    """How much is asked by all processes together: an open loop, or `clients` in a closed one.

    It ends after `sending_s`, or after `requests` sessions behind `warm_up_s`. Sessions that begin
    within `judged_s` are waited for. A request is cut `drain_s` after both `sending_s` and the time
    it may take: `first_s`, and `token_s` for each token.
    """

    work: Work
    arrival: Arrival
    seed: str
    clients: int = 0
    requests: int = 0
    sending_s: float = float("inf")
    judged_s: float = float("inf")
    drain_s: float = float("inf")
    first_s: float = 0.0
    token_s: float = 0.0
    warm_up_s: float = 0.0


class Share(msgspec.Struct, frozen=True):
    """The part of one process: every `of`-th session from number `index` on."""

    asking: Asking
    load: Load
    index: int
    of: int


class Record(msgspec.Struct):
    """One request: when it was due and sent, and the gaps between the chunks of its answer.

    `counts` has the tokens of each chunk, if the server gave them.
    """

    session: int
    turn: int
    due_s: float
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    chunks: int = 0
    usage: bool = False
    failure: str = ""
    why: str = ""
    gaps_s: list[float] = []
    counts: list[int] = []


class Progress(msgspec.Struct, frozen=True, tag=True):
    sent: int
    done: int
    failed: int
    tokens: int


class ProcessReport(msgspec.Struct, frozen=True, tag=True):
    """The end of a process: its requests, its share of a core, and how late its timers were."""

    records: list[Record]
    cpu_share: float
    lags_s: list[float]


def pack(said: object) -> bytes:
    """Return a message behind its length."""
    body = msgspec.msgpack.encode(said)
    return len(body).to_bytes(_SIZE_BYTES, "big") + body


def size_of(head: bytes) -> int:
    """Return the length that these four bytes give."""
    return int.from_bytes(head, "big")
