"""Probes of the hand-over, the HTTP process's half: from a body to what the engine process is
asked.
"""

from __future__ import annotations

import uuid
from typing import TypeVar

import msgspec

from kvrelay.node.engine_client import EngineClient
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import (
    PROBE_PREFIX,
    FetchProbe,
    OfferProbe,
    ProbeFetched,
    ProbeOffered,
    ProbeRefused,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.transfer import Ticket

__all__ = ["fetch_probe", "offer_probe"]

# A fetch ends by its own deadline; this is for an engine that hangs.
ANSWER_DEADLINE_S = 60.0

_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Offer(msgspec.Struct):
    blocks: int


class _Fetch(msgspec.Struct):
    ticket: Ticket
    seed: int


async def offer_probe(role: Role, engine: EngineClient, body: bytes) -> ProbeOffered | ProbeRefused:
    """Source: offer so many blocks. Raises RequestError, EngineDead, DeadlineExceeded."""
    _check_role(role, Role.DECODE, "source")
    blocks = _decoded(body, _Offer).blocks
    answer = await engine.ask(OfferProbe(_fresh_id(), blocks), ANSWER_DEADLINE_S)
    assert not isinstance(answer, ProbeFetched)
    return answer


async def fetch_probe(role: Role, engine: EngineClient, body: bytes) -> ProbeFetched | ProbeRefused:
    """Reader: fetch what another node has offered. Raises RequestError, EngineDead,
    DeadlineExceeded.
    """
    _check_role(role, Role.PREFILL, "reader")
    asked = _decoded(body, _Fetch)
    port = asked.ticket.remote_port
    if not 0 < port < 65536:
        raise RequestError(
            f"the ticket's remote_port {port} is none; pass on what the other node has offered"
        )
    answer = await engine.ask(FetchProbe(_fresh_id(), asked.ticket, asked.seed), ANSWER_DEADLINE_S)
    assert not isinstance(answer, ProbeOffered)
    return answer


def _check_role(role: Role, never: Role, part: str) -> None:
    if role is never:
        raise RequestError(f"this node's role is {role}: it is never the {part} of a hand-over")


def _fresh_id() -> str:
    return f"{PROBE_PREFIX}{uuid.uuid4().hex}"


def _decoded(body: bytes, kind: type[_Body]) -> _Body:
    try:
        decoded = msgspec.json.decode(body, type=kind)
        msgspec.msgpack.encode(decoded)  # JSON knows larger numbers than what it is passed on as
        return decoded
    except (*MALFORMED, OverflowError) as why:
        fields = ", ".join(kind.__struct_fields__)
        raise RequestError(f"the body must be a JSON object with {fields}: {why}") from why
