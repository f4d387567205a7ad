"""How fast a node is, measured online from what the router sees of it. Pure: no clock and no node.

Every rate is a *curve*: milliseconds as a function of a size, by classes of size, that never falls. A curve begins as a
prior, a guess or what a rate card says; each measurement says by what ratio the prior of that size was wrong. Classes
that were not measured follow those that were, and a node follows its *fleet* (the nodes of its role and model) until it
is measured itself. Old measurements count less with each new one and with time, so a node that was slow once is found
out when it no longer is. Outliers move an estimate by a bounded factor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from planning.rate_card import RateCard

__all__ = ["Curve", "NodeRates"]

_KEPT = 0.9  # of the weight of older measurements, with each new one: about ten of them count
_HALF_LIFE_S = 60.0
_AGEING_INTERVAL_S = 5.0
# A node's first measurement counts as much as its fleet's; a fleet's counts more than the prior.
_FLEET_WEIGHT = 1.0
_PRIOR_WEIGHT = 0.1
# A rate card's counts as a measurement: it was one, of such a node under other load.
_CARD_WEIGHT = 1.0
# Of less than half a measurement nothing is left but what was thought before.
_SURE_WEIGHT = 0.5
# A short prompt in a step with long ones takes as long as they do. Counted in full, prompts seem to take about the same
# time whatever their length, and what is cached to be worth little (simulated, with shared contexts of 3,000 to 16,000
# tokens and empty caches: a third of the requests meet their aims, instead of seven tenths).
_SHARED_ABOVE = 0.1
# Of a step with decodes so much is a prompt's at least, however long such steps are thought to take without it.
_LEAST_OWN = 0.1
# A measurement beyond this factor of a settled estimate counts as one at it: a pause of a node is no news of its speed,
# and a true change gets through with a few measurements.
_MOST_OFF = 4.0
_MOST_OFF_LOG = math.log(_MOST_OFF)
_SETTLED = 2.5
_MOST_UNDRAWN = 3
_CLASSES = 12
_MOST_PEERS = 256
_LEAST_WAIT_MS = 1.0

# Priors: about a model of 8 billion parameters on one GPU. Only their shape matters for long.
_PREFILL_MS = (5.0, 0.04)
_STEP_MS = (8.0, 0.1)
_TRANSFER_MS = (2.0, 0.002)
_OUTPUT_TOKENS = 200.0
# Length of a prompt, where nobody knows how tokens are divided.
_TYPICAL = 1024
_ONES = [1.0] * _CLASSES
_LEAST_MS = 1e-3


class Curve:
    """Milliseconds for a size, at least 0 and never less for more. The prior is fixed_ms + ms_each * size, or `known`.

    Class k holds sizes from 2**(bits * k) on. `parent` is the fleet's curve of the same shape, whose prior it takes.
    `level`: a size is what one thing has grown to, as a batch, and not drawn anew each time, as a prompt's length.
    """

    __slots__ = (
        "_at_knots",
        "_bits",
        "_first",
        "_heights",
        "_knots",
        "_known_ratios",
        "_level",
        "_parent",
        "_prior",
        "_sums",
        "_top",
        "_tops",
        "_undrawn",
        "_weight",
        "_weights",
        "each",
        "given",
        "least",
        "measured",
    )
    _knots: list[float]
    _at_knots: list[float]
    _first: float
    given: bool

    def __init__(
        self,
        fixed_ms: float,
        ms_each: float,
        bits: int,
        parent: Curve | None = None,
        known: Callable[[float], float] | None = None,
        *,
        level: bool = False,
    ) -> None:
        self._prior = fixed_ms, ms_each
        self._level = level
        self._bits = bits
        self._parent = parent
        self._sums = [0.0] * _CLASSES
        self._weights = [0.0] * _CLASSES
        self._knots = [2.0 ** (bits * (at + 0.5)) for at in range(_CLASSES)] if parent is None else parent._knots
        self.given = known is not None if parent is None else parent.given
        """Whether the prior is known and no guess."""
        # The prior, at the knots and of the smallest size.
        if parent is not None:
            self._at_knots, self._first = parent._at_knots, parent._first
        elif known is not None:
            self._first = highest = max(_LEAST_MS, known(1.0))
            self._at_knots = []
            for knot in self._knots:
                highest = max(highest, known(knot))
                self._at_knots.append(highest)
        else:
            self._first = fixed_ms + ms_each
            self._at_knots = [fixed_ms + ms_each * knot for knot in self._knots]
        self._heights = self._at_knots  # as last drawn
        self._undrawn = 1  # how much has been measured or forgotten since
        self._known_ratios: list[float] | None = None  # None: to be reckoned anew
        self._weight = 0.0  # the sum of all
        self.measured = False
        """Whether anything was, ever."""
        self._tops = [0.0] * _CLASSES  # the largest sizes of late of each class of which at least _SURE_WEIGHT is left
        self._top = 0.0  # of them: asked for in each request that has targets
        self.least, self.each = self._first, self._prior_ms(_TYPICAL) / _TYPICAL
        """Of the smallest size, and for each one of a typical size."""

    def at(self, size: float) -> float:
        """The estimate in milliseconds; 0 for nothing."""
        if size <= 0:
            return 0.0
        if not self.measured and self._parent is not None:
            return self._parent.at(size)
        if self._undrawn and (self._weight < _SETTLED or self._undrawn >= _MOST_UNDRAWN):
            self._draw()
        return self._read(self._heights, size)

    def sure(self, size: float) -> float:
        """The estimate for this size, or for the largest one that was measured of late if that is smaller: no guess of
        what lies beyond. 0 if nothing was."""
        if self.given:
            return self.at(size)
        top = self._top if self._parent is None else max(self._top, self._parent._top)
        return self.at(min(size, top))

    def _prior_ms(self, size: float) -> float:
        if self.given:
            return self._read(self._at_knots, size)
        fixed_ms, ms_each = self._prior
        return fixed_ms + ms_each * size

    def _read(self, heights: list[float], size: float) -> float:
        """Between and beyond these heights at the knots."""
        knots = self._knots
        above = bisect_left(knots, size)
        if above == _CLASSES:
            return heights[-1] * size / knots[-1]
        if not above and not self.given:
            return heights[0] * self._prior_ms(size) / self._at_knots[0]
        if not above:
            first = heights[0] * (self._first / self._at_knots[0])  # exactly as high if both are
            return first + (heights[0] - first) * max(0.0, size - 1.0) / (knots[0] - 1.0)
        left, low = knots[above - 1], heights[above - 1]
        return low + (heights[above] - low) * (size - left) / (knots[above] - left)

    def known(self) -> Curve:
        """This curve, or that which stands for it, up to date."""
        if not self.measured and self._parent is not None:
            return self._parent.known()
        if self._undrawn and (self._weight < _SETTLED or self._undrawn >= _MOST_UNDRAWN):
            self._draw()
        return self

    def measure(self, size: float, ms: float, above: float = 1.0) -> None:
        """So long it took; what is beyond the estimate counts `above` of itself. Sizes below 1 say nothing."""
        if size < 1 or ms <= 0:
            return
        prior_ms = self._prior_ms(size)
        at = min((int(size).bit_length() - 1) // self._bits, _CLASSES - 1)
        if self._weight > _SETTLED:
            # What an outlier is needs no newest estimate, and drawing one each time would cost more than all else. By
            # the estimate of this size, which is between two knots, what is damped would drift away from its class.
            sure = self._weights[at] >= _SURE_WEIGHT
            known = self._sums[at] / self._weights[at] * prior_ms if sure else self.at(size)
            ms = min(max(ms, known / _MOST_OFF), known * _MOST_OFF)
            if ms > known:
                ms = known + (ms - known) * above
        self._sums[at] = self._sums[at] * _KEPT + ms / prior_ms
        before = self._weights[at]
        after = self._weights[at] = before * _KEPT + 1.0
        self._weight += after - before
        top = self._tops[at]
        self._tops[at] = max(size, top * _KEPT + size * (1 - _KEPT) if self._level else top)
        self._top = max(self._tops)
        self.measured = True
        self._undrawn += 1
        self._known_ratios = None

    def fade(self, factor: float) -> None:
        """What was measured counts so much less from now on. Of a whole fleet only what is slower than thought: for it
        requests are refused that would show what it is now. What is faster is asked, and so measured."""
        if self.measured:
            fades = [
                factor if self._parent is not None or total > weight else 1.0
                for total, weight in zip(self._sums, self._weights, strict=True)
            ]
            self._sums = [each * fade for each, fade in zip(self._sums, fades, strict=True)]
            self._weights = [each * fade for each, fade in zip(self._weights, fades, strict=True)]
            self._weight = sum(self._weights)
            self._tops = [
                top if weight >= _SURE_WEIGHT else 0.0 for top, weight in zip(self._tops, self._weights, strict=True)
            ]
            self._top = max(self._tops)
            self._undrawn += 1
            self._known_ratios = None

    def _ratios(self) -> list[float]:
        """By class, how far the prior is off."""
        if self._known_ratios is not None and self._parent is None:
            return self._known_ratios
        theirs = _ONES if self._parent is None else self._parent._ratios()
        weight = self._weight
        if not weight:
            return theirs
        expected = 0.0
        for count, ratio in zip(self._weights, theirs, strict=True):
            expected += count * ratio
        trust = _FLEET_WEIGHT
        if self._parent is None:
            trust = _CARD_WEIGHT if self.given else _PRIOR_WEIGHT
        typical = trust * expected / weight
        trusted = trust * (sum(self._sums) + typical) / (expected + typical)
        self._known_ratios = [
            (total + trusted * ratio) / (count + trust)
            for total, count, ratio in zip(self._sums, self._weights, theirs, strict=True)
        ]
        return self._known_ratios

    def _draw(self) -> None:
        """Heights at the knots, from the ratios as they are now."""
        highest, heights = 0.0, []
        for prior_ms, ratio in zip(self._at_knots, self._ratios(), strict=True):
            ms = ratio * prior_ms
            if ms > highest:
                highest = ms
            heights.append(highest)
        self._heights, self._undrawn = heights, 0
        self.least = self._read(heights, 1)
        self.each = self._read(heights, _TYPICAL) / _TYPICAL


class NodeRates:
    """Of one node; or of a fleet, which learns from all of its nodes."""

    __slots__ = ("_aged_at_s", "_output", "_peers", "_prefill", "_step", "_transfer", "_wait_ratio", "fleet")
    _prefill: Curve
    _step: Curve
    _transfer: Curve
    _output: float

    def __init__(self, fleet: NodeRates | None = None, card: RateCard | None = None) -> None:
        """`card` is a fleet's: what was measured of such a node before."""
        self.fleet = fleet
        prompt, step, fetch = _of_card(card)
        self._prefill = Curve(*_PREFILL_MS, 2, None if fleet is None else fleet._prefill, prompt)
        self._step = Curve(*_STEP_MS, 1, None if fleet is None else fleet._step, step, level=True)
        self._transfer = Curve(*_TRANSFER_MS, 2, None if fleet is None else fleet._transfer, fetch)
        self._peers: dict[str, tuple[float, float]] = {}  # logarithms of how far each is off, and their weight
        self._wait_ratio = 1.0
        self._output = _OUTPUT_TOKENS
        self._aged_at_s: float | None = None

    def prefills_like(self, other: NodeRates) -> None:
        """Until a prompt was computed here, one takes as long as there."""
        self._prefill = Curve(*_PREFILL_MS, 2, other._prefill)

    @property
    def measured(self) -> bool:
        """Whether no estimate is a mere guess: of prompts, steps and transfers each was measured once at least, here or
        for a rate card."""
        curves = (self._prefill.known(), self._step.known(), self._transfer.known())
        return all(curve.measured or curve.given for curve in curves)

    # --- estimates -----------------------------------------------------------------------------------------------

    def prefill_ms(self, tokens: float) -> float:
        """To compute a prompt of which so many tokens are not cached."""
        return self._prefill.at(tokens)

    def prompts_ms(self, tokens: float) -> float:
        """To compute so many tokens of nobody knows how many prompts."""
        return self._wait_ratio * self._prefill.known().each * tokens

    def queue_ms(self, tokens: float, requests: int) -> float:
        """Until so many tokens of so many requests are computed that are ahead in the queue, the first of which is half
        computed on average. A request that is there costs a little even if nobody knows of tokens of it."""
        # Without that half a queue of one would seem too long, or by one ratio for all those of two and three too
        # short, and more would join them than can be in time.
        left, known = tokens * (1 - 0.5 / max(1, requests)), self._prefill.known()
        return self._wait_ratio * (known.each * left + known.least * requests)

    def step_ms(self, running: float) -> float:
        """One decode step with so many running requests."""
        return self._step.at(running)

    def sure_prefill_ms(self, tokens: float) -> float:
        """prefill_ms(), but of no more tokens than were measured: by this a request may be refused."""
        return self._prefill.sure(tokens)

    def sure_step_ms(self, running: float) -> float:
        """step_ms(), but of no more requests than were measured: by this a request may be refused."""
        return self._step.sure(running)

    def transfer_ms(self, peer: str, tokens: float) -> float:
        """What a request waits for the KV of so many tokens from `peer` beside its prefill; from any, if empty."""
        total, weight = self._peers.get(peer, (0.0, 0.0))
        return self._transfer.at(tokens) * math.exp(total / (weight + _FLEET_WEIGHT))

    def output_tokens(self, limit: int = 0) -> float:
        """How long an answer will probably be that may have `limit` tokens (0: any number). Equal in a fleet."""
        usual = self._output if self.fleet is None else self.fleet._output
        return min(usual, limit) if limit else usual

    # --- measurements --------------------------------------------------------------------------------------------

    def prefilled(self, tokens: int, ms: float, *, shared: bool = False, beside: float = 0.0) -> None:
        """So many tokens of a prompt were computed in this time; `shared`: perhaps in steps with other prompts;
        `beside` so many requests that decoded in the same step: what it took for them is not the prompt's."""
        # With it, short prompts beside many decodes would seem to take twice their time, and with them all lengths:
        # those of 2,048 tokens that come next would be believed to stop streams for too long, and none would be tried.
        step = self._step.known()
        if beside and (step.measured or step.given):
            # What any step takes, to read the weights, a short prompt takes alone, too; in a long one it is hidden.
            rest, least = ms - step.at(beside), step.at(1)
            ms = max(rest, min(rest + least, 2 * least), _LEAST_OWN * ms)
        self._prefill.measure(tokens, ms, above=_SHARED_ABOVE if shared else 1.0)
        if self.fleet is not None:
            self.fleet.prefilled(tokens, ms, shared=shared)

    def waited(self, expected_ms: float, ms: float) -> None:
        """A prompt waited so long for its turn, when queue_ms() had said how long."""
        if expected_ms >= _LEAST_WAIT_MS:
            ratio = min(max(self._wait_ratio * ms / expected_ms, 1 / _MOST_OFF), _MOST_OFF)
            self._wait_ratio = self._wait_ratio * _KEPT + ratio * (1 - _KEPT)

    def stepped(self, running: float, ms: float) -> None:
        """Decode steps took this time each, with so many running requests on average."""
        self._step.measure(running, ms)
        if self.fleet is not None:
            self.fleet.stepped(running, ms)

    def fetched(self, peer: str, tokens: int, ms: float) -> None:
        """A request waited so long for KV of so many tokens from `peer`; empty: this node was the one read from."""
        if peer and tokens > 0 and ms > 0:
            total, weight = self._peers.pop(peer, (0.0, 0.0))
            off, known = math.log(ms / self._transfer.at(tokens)), total / (weight + _FLEET_WEIGHT)
            off = min(max(off, known - _MOST_OFF_LOG), known + _MOST_OFF_LOG)
            if len(self._peers) >= _MOST_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[peer] = total * _KEPT + off, weight * _KEPT + 1.0
        self._transfer.measure(tokens, ms)
        if self.fleet is not None:
            self.fleet.fetched("", tokens, ms)

    def generated(self, tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._output = self._output * (0.5 + _KEPT / 2) + tokens * (0.5 - _KEPT / 2)
        if self.fleet is not None:
            self.fleet.generated(tokens)

    def age(self, now: float) -> None:
        """Time has passed, for its fleet, too, by any one monotonic clock in seconds; call it as often as you like."""
        if self.fleet is not None:
            self.fleet.age(now)
        passed_s = now - (now if self._aged_at_s is None else self._aged_at_s)
        if self._aged_at_s is not None and passed_s < _AGEING_INTERVAL_S:
            return
        self._aged_at_s = now
        factor = 0.5 ** (passed_s / _HALF_LIFE_S)
        for curve in (self._prefill, self._step, self._transfer):
            curve.fade(factor)
        self._peers = {peer: (total * factor, weight * factor) for peer, (total, weight) in self._peers.items()}
        self._wait_ratio = 1.0 + (self._wait_ratio - 1.0) * factor


_Known = Callable[[float], float] | None


def _of_card(card: RateCard | None) -> tuple[_Known, _Known, _Known]:
    """What it says of prompts and transfers by tokens, and of steps by running requests of a typical length."""
    if card is None:
        return None, None, None
    of: RateCard = card

    def prompt(tokens: float) -> float:
        longest = of.kv_tokens  # no prompt is longer; and each of its chunks is looked up
        return of.prompt_ms(math.ceil(min(tokens, longest))) * max(1.0, tokens / longest)

    def step(running: float) -> float:
        return of.step_ms(running, running * _TYPICAL)

    def fetch(tokens: float) -> float:
        return of.fetch_ms(math.ceil(tokens))

    return prompt, step, fetch if of.transfer else None
