"""What the processes of the client say to each other: what to send, how far they are, what became
of each request.

msgpack with types over pipes, each message behind its length. Seconds are counted from the begin of
the run, which is a time on the machine's monotonic clock, the same for all processes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvrelay.load.prompts import Spelling
from kvrelay.load.sessions import Arrival, Work

__all__ = [
    "Asking",
    "Begin",
    "Failure",
    "Load",
    "Progress",
    "Record",
    "Share",
    "Told",
    "pack",
    "size_of",
]

_SIZE_BYTES = 4


class Failure(StrEnum):
    """Why a request has no good answer. CUT is nobody's fault: the run was over. CLIENT is the
    client's own.
    """

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
    """How requests are put: where, of whom, with which fields beside prompt and length."""

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
    """Servers like it, which are asked in turn with it: session by session."""
    headers: dict[str, str] = {}
    """Sent with each request beside the usual ones."""


class Load(msgspec.Struct, frozen=True):
    """How much is asked, by all processes together: an open loop, or a closed one of `clients`.

    It ends after `sending_s`, or with `requests` sessions, those that begin within `warm_up_s` not
    counted. Sessions that begin within `judged_s` are waited for, the others not. A request is cut
    `drain_s` after `sending_s`, but never before `drain_s` after the time that it has: `first_s`,
    and `token_s` for each token that it asks for.
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


class Begin(msgspec.Struct, frozen=True):
    """`at`: on the monotonic clock."""

    at: float


class Record(msgspec.Struct):
    """One request. `due_s` is when it was to be sent, `sent_s` when it was; `gaps_s` are those
    between the chunks of its answer, of which chunk `i` had `counts[i]` tokens if the server said
    so.
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
    """So far."""

    sent: int
    done: int
    failed: int
    tokens: int


class Told(msgspec.Struct, frozen=True, tag=True):
    """At the end of a process: its requests, the share of a core that it took, and by how much its
    timers were late.
    """

    records: list[Record]
    cpu_share: float
    lags_s: list[float]


def pack(said: object) -> bytes:
    """A message behind its length."""
    body = msgspec.msgpack.encode(said)
    return len(body).to_bytes(_SIZE_BYTES, "big") + body


def size_of(head: bytes) -> int:
    """The length of the message behind these four bytes."""
    return int.from_bytes(head, "big")
