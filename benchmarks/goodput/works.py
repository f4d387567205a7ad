"""What is compared: works with their targets, and the ways to serve them with the same nodes.
Values only.

All nodes are alike, and a node's role is a run-time value: so one cluster is measured as xPyD
behind its router; with each node asked directly, in turn, which is what `kvrelay serve` is (an
engine knows no roles); and as decode nodes behind the router without any prefill node, where each
computes its own prompts and the router spreads by load.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvrelay.load.sessions import LENGTHS, Lengths

__all__ = [
    "GAP_MS",
    "PHYSICS",
    "VLLM",
    "VLLM_SOURCE",
    "WORKS",
    "Arm",
    "Fixed",
    "Work",
    "flips_to",
    "parse_work",
]

GAP_MS = 50.0
"""Between two tokens of a smooth answer."""


class Arm(enum.StrEnum):
    """A way to serve."""

    RELAY = "relay"
    """Prefill and decode nodes behind the router."""
    DIRECT = "direct"
    """Colocated servers; the client asks them in turn."""
    ROUTED = "routed"
    """Colocated servers; the router chooses."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one kind. Rates are requests a second of all GPUs: where the search begins."""

    name: str
    lengths: Lengths
    prefill: int
    decode: int
    relay_rate: float
    colocated_rate: float
    window_s: float
    """Seconds of a probe that count."""
    smooth: bool = False
    """Whether the highest rate without gaps above GAP_MS is searched, too."""

    def arm_name(self, arm: Arm) -> str:
        """As it is called in tables."""
        if arm is Arm.RELAY:
            return f"{self.prefill}P{self.decode}D"
        how = "asked in turn" if arm is Arm.DIRECT else "behind the router"
        return f"{self.prefill + self.decode} colocated, {how}"

    def rate(self, arm: Arm) -> float:
        """Where the search begins."""
        return self.relay_rate if arm is Arm.RELAY else self.colocated_rate

    @property
    def answer_s(self) -> float:
        """What an answer takes that just meets its targets."""
        return (self.lengths.ttft_ms + self.lengths.tpot_ms * self.lengths.output) / 1e3


WORKS = {
    "chat": Work("chat", LENGTHS["chat"], 2, 2, 160.0, 136.0, 8.0),
    "code": Work("code", LENGTHS["code"], 3, 1, 50.0, 36.0, 10.0),
    "summarise": Work("summarise", LENGTHS["summarise"], 3, 1, 10.8, 6.4, 20.0, smooth=True),
}
"""For four H200s and a model of 8 billion parameters. Ratios are those of `kvrelay plan`."""


def parse_work(text: str) -> Work:
    """A name of WORKS, or NAME=IN:OUT:TTFT_MS:TPOT_MS:P:D:RATE:COLOCATED_RATE:SECONDS, whose
    answers have to be smooth if those of this name in WORKS have. Raises ValueError.
    """
    name, equals, rest = text.partition("=")
    if not equals:
        if name not in WORKS:
            raise ValueError(
                f"{name!r} is none of {', '.join(WORKS)}, and no NAME=IN:OUT:TTFT:TPOT:P:D:R:R:S"
            )
        return WORKS[name]
    parts = rest.split(":")
    if len(parts) != 9:
        raise ValueError(
            f"{text!r} must have nine numbers: IN:OUT:TTFT:TPOT:P:D:RATE:COLOCATED_RATE:SECONDS"
        )
    prompt, output, prefill, decode = (int(parts[at]) for at in (0, 1, 4, 5))
    ttft_ms, tpot_ms, rate, colocated, window_s = (float(parts[at]) for at in (2, 3, 6, 7, 8))
    if (
        min(prompt, output, prefill, decode) < 1
        or min(ttft_ms, tpot_ms, rate, colocated, window_s) <= 0
    ):
        raise ValueError(f"{text!r}: all of its numbers must be above 0")
    smooth = name in WORKS and WORKS[name].smooth
    return Work(
        name,
        Lengths(prompt, output, ttft_ms, tpot_ms),
        prefill,
        decode,
        rate,
        colocated,
        window_s,
        smooth,
    )


def flips_to(roles: dict[str, str], prefill: int) -> list[tuple[str, str]]:
    """Which nodes (url, role) must take another role, so that `prefill` of them are prefill nodes:
    as few as can be.

    Those that become decode nodes come first, so that there always is one.
    """
    of = {
        role: sorted(url for url, its in roles.items() if its == role)
        for role in ("prefill", "decode")
    }
    more = prefill - len(of["prefill"])
    if more >= 0:
        return [(url, "prefill") for url in of["decode"][len(of["decode"]) - more :]]
    return [(url, "decode") for url in of["prefill"][more:]]


@dataclass(frozen=True, slots=True)
class Fixed:
    """What others were seen to do, per GPU: (requests a second, share that met its targets), and
    where that is from.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    rate: str
    """At 90 %, in words."""
    smooth: str
    """The same with no gap above GAP_MS."""
    told: str


VLLM = {
    "chat": Fixed(
        "vLLM 0.26",
        ((8.0, 1.0), (14.0, 1.0), (20.0, 1.0), (26.0, 1.0)),
        "above 26",
        "",
        "at 26: ITL p99 26.5 ms",
    ),
    "code": Fixed(
        "vLLM 0.26", ((4.0, 0.99), (8.0, 0.91), (12.0, 0.72)), "8", "", "at 8: ITL p99 48 ms"
    ),
    "summarise": Fixed(
        "vLLM 0.26",
        ((0.8, 1.0), (1.6, 1.0), (2.4, 0.48)),
        "1.9",
        "near 0",
        "at 1.6: ITL p99 189 ms",
    ),
}
VLLM_SOURCE = (
    "vLLM 0.26.0 was measured on one GPU of the same kind (2026-11-21; Llama-3.1-8B shape, bf16, "
    "random weights, FA3, "
    "full CUDA graphs, async scheduling, no prefix cache; open-loop Poisson, windows of 20 s, by "
    "`vllm bench serve`). "
    "It is drawn per GPU, as if four of it scaled perfectly."
)
PHYSICS = {
    "chat": (40.0, 30.0),
    "code": (15.0, 12.0),
    "summarise": (2.9, 2.7),
    "summarise, smooth": (2.9, 2.4),
}
"""Requests a second and GPU: about what the hardware allows, and the aim."""
