"""Which prefill node's KV which decode node can take: what both report of themselves, and what
lately went wrong between them. Pure: `now` is an argument.

A node that reports nothing of its KV (another project's) can talk with all: its own handshake will
tell. Which of the nodes that can talk is best is a question of cost (router/placement.py).
"""

from __future__ import annotations

import functools
from ipaddress import ip_address
from math import inf

from kvrelay.router.placement import LINK_MS
from kvrelay.wire.transfer import KvFacts

__all__ = ["AVOID_S", "FailedPairs", "Kinds", "Links", "unlike"]

_SAME_HOST_PLANE = "direct"
_MOST_LINKS, _LINK_WEIGHT = 4096, 1 / 16
AVOID_S, AVOID_CAP_S = 5.0, 120.0


@functools.lru_cache(4096)
def unlike(prefill: KvFacts | None, decode: KvFacts | None) -> str | None:
    """Return None if the decode node can take the prefill node's KV, else one clause naming both
    values.
    """
    if prefill is None or decode is None:
        return None
    difference = prefill.fingerprint.difference(decode.fingerprint)
    if difference is not None:
        return difference.replace(" here and ", " on the prefill node and ").replace(
            " there", " on the decode node"
        )
    shared = [plane for plane in prefill.planes if plane in decode.planes]
    if not shared:
        mine, theirs = (", ".join(facts.planes) or "none" for facts in (prefill, decode))
        return f"data planes are {mine} on the prefill node and {theirs} on the decode node"
    if not prefill.host or not decode.host or prefill.host == decode.host:
        return None
    where = f"the prefill node is on host {prefill.host} and the decode node on {decode.host}"
    if shared == [_SAME_HOST_PLANE]:
        return (
            f"their only common data plane is {_SAME_HOST_PLANE}, which needs one host, and {where}"
        )
    if _is_loopback(prefill.address):
        return f"the prefill node's control channel is at {prefill.address}, and {where}"
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class Kinds:
    """A record of what nodes have said of their KV. As long as any two of a model can talk, no
    choice needs to look.
    """

    def __init__(self) -> None:
        self.mixed = False
        self._met: dict[str, set[KvFacts]] = {}

    def meet(self, model: str, facts: KvFacts | None) -> None:
        """Note what a node that serves this model says of itself."""
        met = self._met.setdefault(model, set())
        if facts is None or facts in met:
            return
        met.add(facts)
        self.mixed = self.mixed or any(
            unlike(facts, other) or unlike(other, facts) for other in met
        )


class Links:
    """A record of how long KV is under way behind its prefill, by pair: bounded means of what was
    seen.
    """

    def __init__(self) -> None:
        self._ms: dict[tuple[str, str], float] = {}
        self.differ = False
        """Whether it matters which pair it is."""

    def saw(self, prefill: str, decode: str, ms: float) -> None:
        """Learn from a hand-over."""
        if not 0 <= ms < inf:
            return
        pair = prefill, decode
        known = self._ms.pop(pair, None)
        if known is None and len(self._ms) >= _MOST_LINKS:
            del self._ms[next(iter(self._ms))]
        self._ms[pair] = (
            ms if known is None else known + _LINK_WEIGHT * (min(ms, 8 * known + 1) - known)
        )
        self.differ = len(self._ms) > 1

    def ms(self, prefill: str, decode: str) -> float:
        """Return what is expected."""
        known = self._ms.get((prefill, decode))
        return LINK_MS if known is None else known


class FailedPairs:
    """A record of pairs between which KV did not come lately: avoided for a time that doubles until
    it comes again.
    """

    def __init__(self) -> None:
        self._faults: dict[tuple[str, str], tuple[int, float]] = {}
        """How often in a row, and until when they are avoided."""

    def __bool__(self) -> bool:
        return bool(self._faults)

    def failed(
        self, prefill: str, decode: str, cause: str, now: float, first_s: float = AVOID_S
    ) -> None:
        """Note that the KV of the prefill node did not come. Nodes are named by generation or URL.

        `first_s`: avoided for so long the first time."""
        if (
            cause == "LeaseLost"
        ):  # a lease that ran out does not say that the way between the two is bad
            return
        times, _ = self._faults.get((prefill, decode), (0, 0.0))
        self._faults[prefill, decode] = (
            times + 1,
            now + min(AVOID_CAP_S, first_s * 2.0 ** min(times, 32)),
        )
        if len(self._faults) > 10_000:  # nodes that are long gone
            self._faults = {pair: fault for pair, fault in self._faults.items() if fault[1] > now}

    def worked(self, prefill: str, decode: str) -> None:
        """Note that KV came."""
        self._faults.pop((prefill, decode), None)

    def avoided(self, prefill: str, decode: str, now: float) -> bool:
        """Say whether another decode node is to be preferred for this prefill node's KV."""
        fault = self._faults.get((prefill, decode))
        return fault is not None and now < fault[1]
