"""How a node tells KV events (wire/kv_events.py): the names are those of vLLM's
`--kv-events-config`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from kvrelay.wire.config_checks import check_fields, require

__all__ = ["KvEventsConfig", "address_of"]

# The port comes after the last colon, also of an IPv6 number without brackets, as zmq has it.
_ENDPOINT = re.compile(r"tcp://(\*|\[[^\s/\[\]*]+\]|[^\s/\[\]*]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Where a node tells KV events, to whom, and what they say. Off by default, and on the
    loopback.
    """

    enable_kv_cache_events: bool = False
    """Tell which blocks the prefix cache holds."""
    publisher: Literal["zmq", "null"] = "zmq"
    """zmq, or null: tell nobody."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Where events are told, tcp://HOST:PORT. A node always listens there; * is all addresses, port
    0 a free one.
    """
    replay_endpoint: str = ""
    """Where those who have lost some are told again, in the same form; empty: nowhere. A router
    needs it.
    """
    buffer_steps: Annotated[int, Meta(gt=0)] = 10_000
    """Batches that are kept to be told again, in 4 MiB at most."""
    hwm: Annotated[int, Meta(gt=0)] = 1_024
    """Batches that wait for one listener; further ones are lost to it until it asks for them."""
    max_queue_size: Annotated[int, Meta(gt=0)] = 100_000
    """Batches that wait to be published at most; a node publishes each at once, so none does."""
    topic: str = ""
    """What each message begins with, for listeners to choose by."""
    token_ids: bool = False
    """Tell the tokens of each block, too, with its adapter and salt. They are people's words, for
    all who listen.
    """
    event_format: Literal["array", "map"] = "array"
    """array, or map: what vLLM's own types read since June 2026, and its example does not."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            found = _ENDPOINT.fullmatch(value)
            require(
                found is not None and int(found[2]) < 65536 if value else name == "replay_endpoint",
                f"{name} must be tcp://HOST:PORT, got {value!r}; HOST may be *, and port 0 takes "
                f"a free one",
            )
        require(
            self.endpoint != self.replay_endpoint or not address_of(self.endpoint)[1],
            f"endpoint and replay_endpoint are both {self.endpoint}; give one of them another port",
        )

    @property
    def on(self) -> bool:
        """Whether anything is told."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def address_of(endpoint: str) -> tuple[str, int]:
    """Split a checked endpoint into host and port."""
    found = _ENDPOINT.fullmatch(endpoint)
    assert found is not None
    return found[1].strip("[]"), int(found[2])
