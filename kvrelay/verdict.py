"""What `kvrelay doctor` makes of what it has measured: failures and warnings, in words. Pure: no
sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvrelay.wire.sampling import PLAIN_SAMPLING, SamplingDefaults

__all__ = ["NodeSeen", "PairSeen", "Report", "Sample", "judge"]

# Less than this is mostly the time of a message, and says nothing of the way.
_JUDGED_BYTES = 1 << 20
# 10 Gbit/s Ethernet is 1.25: who has RDMA has more.
_SLOW_NETWORK_GB_S = 1.5
# Of the same way between other nodes.
_SLOW_SHARE = 1 / 3


class NodeSeen(msgspec.Struct, frozen=True):
    """One node. `name` is its role and its place in the list."""

    name: str
    role: str
    url: str
    down: str | None = None
    """Why it cannot be examined."""
    recomputed_prompts: int = 0
    """Prompts that it computed because their KV could not be fetched, since its start."""
    model: str = ""
    """As it says while it is up."""
    sampling_defaults: SamplingDefaults = PLAIN_SAMPLING
    """What it gives to requests that leave out how to sample."""


class Sample(msgspec.Struct, frozen=True):
    """Probes of one size, the fastest of them. `read_s` of its `seconds` the data plane was
    reading.
    """

    blocks: int
    num_bytes: int
    seconds: float
    read_s: float
    gb_s: float
    """10**9 bytes per second of `read_s`."""
    verified: bool
    """Whether the bytes of all of them arrived as they were sent."""


class PairSeen(msgspec.Struct, frozen=True):
    """One way that KV can take, from a prefill node to a decode node."""

    prefill: str
    decode: str
    refused: str | None = None
    """Why no KV can be handed over, in one sentence."""
    plane: str = ""
    same_host: bool = False
    missed: dict[str, str] = {}
    """Data planes that are preferred to `plane`, and why each cannot be had."""
    samples: list[Sample] = []

    @property
    def judged(self) -> Sample | None:
        """The largest sample, if it says how fast this way is."""
        largest = max(self.samples, key=lambda sample: sample.num_bytes, default=None)
        return largest if largest is not None and largest.num_bytes >= _JUDGED_BYTES else None

    @property
    def way(self) -> str:
        """The subject of a sentence."""
        rate = f" at {_rate(self.judged.gb_s)}" if self.judged is not None else ""
        return f"{self.decode} reads {self.prefill} by {self.plane}{rate}"


def _rate(gb_s: float) -> str:
    return f"{gb_s:.0f} GB/s" if gb_s >= 10 else f"{gb_s:.2g} GB/s"


class Report(msgspec.Struct, frozen=True):
    """All of it. Healthy means: each pair of nodes hands KV over and not a byte was wrong."""

    healthy: bool
    nodes: list[NodeSeen]
    pairs: list[PairSeen]
    failures: list[str]
    warnings: list[str]


def judge(
    nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen], others: Sequence[str] = ()
) -> Report:
    """The report on these measurements; `others` says which nodes nobody could measure."""
    failures = [*_failures(nodes, pairs)]
    warnings = [*others, *_slow_ways(pairs), *_recomputing(nodes), *_sampling_apart(nodes)]
    return Report(not failures, list(nodes), list(pairs), failures, warnings)


def _failures(nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen]) -> Iterator[str]:
    paired = {pair.prefill for pair in pairs}
    models = {node.model for node in nodes if node.down is None}
    for model in sorted(models) or [""]:
        if not any(node.model == model and node.name in paired for node in nodes):
            of = f" with the model {model!r}" if len(models) > 1 else ""
            yield f"there is no pair of a prefill and a decode node{of} that are both up"
    for node in nodes:
        if node.down is not None:
            yield f"{node.name} ({node.url}): {node.down}"
    for pair in pairs:
        if pair.refused is not None:
            yield f"{pair.decode} cannot take KV of {pair.prefill}: {pair.refused}"
        wrong = [str(sample.blocks) for sample in pair.samples if not sample.verified]
        if wrong:
            yield (
                f"{pair.way}, and the bytes that arrived are not those that were sent (probes of "
                f"{', '.join(wrong)}"
                " blocks): serve nothing this way, force another with --kv-connector, and report it"
            )


def _slow_ways(pairs: Sequence[PairSeen]) -> Iterator[str]:
    for pair in pairs:
        if pair.refused is not None:
            continue
        if pair.same_host and pair.plane != "direct":
            why = pair.missed.get("direct", "one of them was told to use another (--kv-connector)")
            yield f"{pair.way} although the two share a host and could use direct: {why}"
        elif not pair.same_host:
            for kind, why in pair.missed.items():
                if kind != "direct":  # is for one host only
                    yield f"{pair.way} and not by {kind}: {why}"
            if pair.judged is not None and pair.judged.gb_s < _SLOW_NETWORK_GB_S:
                yield (
                    f"{pair.way}, no more than 10 Gbit/s Ethernet gives: if there is RDMA between "
                    f"the two hosts, UCX "
                    "does not use it (does the container see /dev/infiniband, and what does "
                    "UCX_TLS say?)"
                )
        alike = [
            p.judged.gb_s
            for p in pairs
            if p.judged and (p.plane, p.same_host) == (pair.plane, pair.same_host)
        ]
        if pair.judged is not None and pair.judged.gb_s < _SLOW_SHARE * max(alike):
            yield (
                f"{pair.way}, and another pair does {_rate(max(alike))} the same way: compare "
                f"their hosts and links"
            )


def _recomputing(nodes: Sequence[NodeSeen]) -> Iterator[str]:
    for node in nodes:
        if node.recomputed_prompts:
            yield (
                f"{node.name} has computed {node.recomputed_prompts} prompts itself since its "
                f"start, because their KV "
                "could not be fetched: its log says why for each, kvrelay_fetches_failed_total "
                "counts the causes"
            )


def _sampling_apart(nodes: Sequence[NodeSeen]) -> Iterator[str]:
    first: dict[str, NodeSeen] = {}
    for node in nodes:
        other = first.setdefault(node.model, node) if node.down is None else node
        if node.sampling_defaults != other.sampling_defaults:
            yield (
                f"{other.name} and {node.name} have different sampling defaults: an answer "
                f"depends on which of them "
                "begins it; give both the same --generation-config and --override-generation-config"
            )
