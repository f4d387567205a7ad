"""Splits of GPUs into prefill and decode nodes, and the most requests that each has time for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.load.workloads import Asked
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.speeds import Speeds
from kvrelay.wire.errors import ConfigError

__all__ = ["Split", "bound_of", "splits"]


@dataclass(frozen=True, slots=True)
class Split:
    """A split; without prefill nodes the others are colocated servers."""

    prefill: int
    decode: int
    prefill_card: RateCard
    decode_card: RateCard

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_card.gpus + self.decode * self.decode_card.gpus

    @property
    def name(self) -> str:
        """Return the name, as 2P2D, with the GPUs of a node if it has several."""
        if not self.prefill:
            return f"{self.decode} colocated{_tp(self.decode_card)}"
        prefill = f"{self.prefill}P{_tp(self.prefill_card)}"
        return f"{prefill}{self.decode}D{_tp(self.decode_card)}"


def _tp(card: RateCard) -> str:
    return f"(TP {card.gpus})" if card.gpus > 1 else ""


def splits(gpus: int, cards: Sequence[RateCard]) -> list[Split]:
    """Return all splits that leave no usable GPU idle. Raises ConfigError if there is none."""
    if gpus < 1:
        raise ConfigError(f"--gpus must be at least 1, got {gpus}")
    if len({card.gpus for card in cards}) < len(cards):
        raise ConfigError("give one --card for each number of GPUs of a node; two are for the same")
    found = [Split(0, gpus // card.gpus, card, card) for card in cards if card.gpus <= gpus]
    least = min(card.gpus for card in cards)
    for prefill_card in cards:
        for decode_card in cards:
            for prefill in range(1, gpus // prefill_card.gpus + 1):
                decode = (gpus - prefill * prefill_card.gpus) // decode_card.gpus
                left = gpus - prefill * prefill_card.gpus - decode * decode_card.gpus
                if decode and left < least:
                    found.append(Split(prefill, decode, prefill_card, decode_card))
    if not found:
        raise ConfigError(
            f"a node takes {least} GPUs and there are {gpus}; give more, or a card of a smaller "
            f"node"
        )
    return found


def bound_of(
    split: Split, asks: Sequence[Asked], block_size: int, tpot_ms: float
) -> tuple[float, str]:
    """Return the rate at which nodes have no time left, and the role that is short first.

    For these requests, as if all earlier ones were cached.
    """
    speeds = Speeds(split.prefill_card)
    prompt_ms = output = context = 0.0
    seen: set[int] = set()
    for each in asks:
        known = 0
        for block in each.blocks:
            if block not in seen:
                break
            known += 1
        seen.update(each.blocks)
        cached = min(known * block_size, each.prompt - 1)
        prompt_ms += speeds.prompt_ms(each.prompt, cached) / len(asks)
        output += each.output / len(asks)
        context += each.output * (each.prompt + each.output / 2) / len(asks)
    decode_ms = output * _token_ms(split.decode_card, context / output, tpot_ms)
    by_decode = split.decode / decode_ms * 1e3
    by_all = (split.prefill + split.decode) / (prompt_ms + decode_ms) * 1e3
    short = "prefill" if split.prefill / prompt_ms < split.decode / decode_ms else "decode"
    return min(by_decode, by_all), short if split.prefill else "time"


def _token_ms(card: RateCard, context: float, tpot_ms: float) -> float:
    most = max(1, min(card.max_num_seqs, int(card.kv_tokens / max(1.0, context))))
    # Steps never get shorter as batches get larger.
    in_time = bisect_right(
        range(1, most + 1), tpot_ms, key=lambda size: card.step_ms(size, size * context)
    )
    size = max(1, in_time)
    return card.step_ms(size, size * context) / size
