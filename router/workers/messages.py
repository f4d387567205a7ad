"""What a worker process and its parent say to each other, and how it is written: a length, then msgpack. Pure.

A message has a number: above 0 it wants an answer, which comes back with the same number below 0; 0 wants none.
Both ends are of one installation, so there are no versions. Lengths are limited, types are checked; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from openai_api.response_store import Stored
from router.admission.rate_limits import Exceeded, Quota, Taken
from router.console.picture import WorkerSeen
from router.membership.members import NodeSpec, Source
from wire.errors import KvrelayError
from wire.frames import MALFORMED
from wire.outputs import Load
from wire.router_config import RouterConfig

__all__ = [
    "MAX_BYTES",
    "Adapter",
    "Added",
    "Address",
    "Answer",
    "Begin",
    "Begun",
    "Died",
    "Done",
    "Drained",
    "Emptied",
    "Exposition",
    "Family",
    "Forget",
    "Forgotten",
    "Frames",
    "FromParent",
    "FromWorker",
    "GiveBack",
    "Heard",
    "Keep",
    "Legs",
    "LegsOf",
    "LinkBroken",
    "Listening",
    "Look",
    "Met",
    "Names",
    "Recall",
    "Recalled",
    "Reload",
    "Reloaded",
    "Removed",
    "Samples",
    "Sampled",
    "Scrape",
    "Seen",
    "Spared",
    "Sync",
    "Take",
    "TakeOver",
    "Told",
    "Took",
    "packed",
]

MAX_BYTES = 64 << 20
"""Of one message; a response that is to be kept is by far the longest."""

_LENGTH_BYTES = 4


class LinkBroken(KvrelayError):
    """What came is no message, or the other end is gone."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric of a registry: its name, help and type, and each sample's name, labels and value."""

    name: str
    about: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class Names(msgspec.Struct, frozen=True, array_like=True):
    """What one source says of nodes."""

    source: Source
    specs: list[NodeSpec]


# Answers.


class Done(_Message, frozen=True):
    """It is done."""


class Took(_Message, frozen=True):
    """One of the two."""

    taken: Taken | None
    exceeded: Exceeded | None


class Recalled(_Message, frozen=True):
    """A response, if it is kept."""

    stored: Stored | None


class Forgotten(_Message, frozen=True):
    """Whether it was kept."""

    was_there: bool


class Exposition(_Message, frozen=True):
    """Of all workers."""

    text: bytes


class Sampled(_Message, frozen=True):
    """All metrics of one worker."""

    families: list[Family]


class LegsOf(_Message, frozen=True):
    """Asked: of all workers but the one that asks; or of one. By address of a node, how many legs are there."""

    legs: dict[str, int]


class Reloaded(_Message, frozen=True):
    """The settings that are new, or why none is."""

    changed: list[str]
    refused: str = ""


class Seen(_Message, frozen=True):
    """Asked: by all workers but the one that asks; or by one. For the console."""

    workers: list[WorkerSeen]


Answer = Done | Took | Recalled | Forgotten | Exposition | Sampled | LegsOf | Reloaded | Seen


# Of membership, both ways: a worker asks for it, its parent tells all workers.


class Added(_Message, frozen=True):
    """An operator names a node."""

    spec: NodeSpec


class Removed(_Message, frozen=True):
    """Neither operator nor flags name it any more."""

    url: str


class Drained(_Message, frozen=True):
    """An operator wants it to take no new legs, or to take them again. `generation` of the process that was meant."""

    url: str
    generation: str
    begin: bool


class Adapter(_Message, frozen=True):
    """A node has loaded an adapter, or unloaded it."""

    url: str
    name: str
    loaded: bool


class Emptied(_Message, frozen=True):
    """The prefix cache of a node was reset."""

    url: str


# From a worker.


class Listening(_Message, frozen=True):
    """It takes connections."""


class Take(_Message, frozen=True):
    """The message's number names what is taken, until it is given back."""

    key: str
    quota: Quota
    tokens: int


class GiveBack(_Message, frozen=True):
    """What was taken by the message of this number."""

    number: int
    used: int | None


class Keep(_Message, frozen=True):
    """A response of this owner."""

    owner: str
    response_id: str
    stored: Stored


class Recall(_Message, frozen=True):
    """A response of this owner is wanted."""

    owner: str
    response_id: str


class Forget(_Message, frozen=True):
    """A response of this owner is to be deleted."""

    owner: str
    response_id: str


class Scrape(_Message, frozen=True):
    """The metrics of all workers are wanted."""


class Met(_Message, frozen=True):
    """Two nodes have met, or could not. Also from the parent."""

    prefill: str
    decode: str
    failed: bool


class Died(_Message, frozen=True):
    """A process died while a request was unanswered there. Also from the parent."""

    fingerprint: bytes
    process: str


class Spared(_Message, frozen=True):
    """A request of which that was said was answered to its end. Also from the parent."""

    fingerprint: bytes


class Legs(_Message, frozen=True):
    """The legs on each node are wanted. Also from the parent."""


class Reload(_Message, frozen=True):
    """The configuration is to be read again."""


class Look(_Message, frozen=True):
    """What the console shows is wanted, of requests those that ended after this Unix time. Also from the parent."""

    since: float


FromWorker = (
    Answer
    | Added
    | Removed
    | Drained
    | Adapter
    | Emptied
    | Listening
    | Take
    | GiveBack
    | Keep
    | Recall
    | Forget
    | Scrape
    | Met
    | Died
    | Spared
    | Legs
    | Reload
    | Look
)


# From the parent.


class Begin(_Message, frozen=True):
    """Serve. `port` of `config` is that of all; the first worker (0) has nodes meet."""

    config: RouterConfig
    index: int
    count: int
    names: list[Names]
    drained: list[Drained]
    addresses: dict[str, str]


class Begun(_Message, frozen=True):
    """So many workers take connections."""

    listening: int


class Told(_Message, frozen=True):
    """A source has told what it sees."""

    names: Names
    gone: list[str]


class Heard(_Message, frozen=True):
    """A node has told of itself."""

    url: str
    load: Load
    draining: bool


class Address(_Message, frozen=True):
    """Of a vLLM node's P2pNcclConnector."""

    url: str
    address: str


class TakeOver(_Message, frozen=True):
    """This is its configuration from now on."""

    config: RouterConfig


class Samples(_Message, frozen=True):
    """Its metrics are wanted."""


class Sync(_Message, frozen=True):
    """An answer to this comes behind all that was said before."""


FromParent = (
    Answer
    | Begin
    | Begun
    | Told
    | Added
    | Removed
    | Drained
    | Adapter
    | Emptied
    | Heard
    | Address
    | TakeOver
    | Samples
    | Sync
    | Met
    | Died
    | Spared
    | Legs
    | Look
)

_encoder = msgspec.msgpack.Encoder()


def packed(number: int, message: FromWorker | FromParent) -> bytes:
    """As it is written. Raises LinkBroken if it is too long."""
    body = _encoder.encode((number, message))
    if len(body) > MAX_BYTES:
        raise LinkBroken(f"a message of {len(body)} bytes is longer than {MAX_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Frames:
    """The messages in what was read so far. `kind` is FromWorker or FromParent."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[int, kind])
        self._read = bytearray()

    def take(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """All that are complete with this. Raises LinkBroken."""
        read = self._read
        read += data
        at = 0
        try:
            while len(read) - at >= _LENGTH_BYTES:
                length = int.from_bytes(read[at : at + _LENGTH_BYTES], "big")
                if length > MAX_BYTES:
                    raise LinkBroken(f"a message of {length} bytes is longer than {MAX_BYTES}")
                end = at + _LENGTH_BYTES + length
                if len(read) < end:
                    break
                body = bytes(read[at + _LENGTH_BYTES : end])
                at = end
                yield self._decoder.decode(body)
        except MALFORMED as why:
            raise LinkBroken(f"what came is no message: {why}") from why
        finally:
            del read[:at]
