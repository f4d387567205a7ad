"""Which tokens of a request are proposed before they are drawn, and which of them the draws have
borne out. Pure.

A decode chunk with k proposals samples 1 + k rows, each with the state that its request would have
if the proposals before it were its tokens. What is drawn at a row is the request's token as long as
all proposals before it were drawn too: a draw depends on seed, choice and token index, not on how
many rows a step has, so the tokens are those of an engine that proposes nothing. Owns the counters;
which rows, tokens and blocks a step has left is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.step_plan import Chunk

__all__ = ["DraftPace", "NgramIndex", "ROWS", "Speculation"]

# A long prompt is indexed in several calls, so that no step of the engine waits longer than about a
# millisecond for it.
_INDEXED_PER_CALL = 2048


class NgramIndex:
    """Where each n-gram of one growing text has occurred last, for n from `shortest` to `longest`."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._follower: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> place of the token behind its newest occurrence
        self._indexed = 0  # so many first tokens are known as followers

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may come next; none if nothing is found. `tokens` may only have
        grown since.
        """
        self._take_in(tokens)
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            place = self._follower.get(tuple(tokens[-n:]))
            if place is not None:
                # What is proposed is copied from as well: a text that repeats itself every few
                # tokens goes on so.
                period = len(tokens) - place
                return [tokens[place + i % period] for i in range(count)]
        return []

    def _take_in(self, tokens: Sequence[int]) -> None:
        end = min(len(tokens), self._indexed + _INDEXED_PER_CALL)
        for place in range(self._indexed, end):
            for n in range(self._shortest, min(self._longest, place) + 1):
                self._follower[tuple(tokens[place - n : place])] = place
        self._indexed = end


_LONGEST_WAIT = 64  # tokens
# Where 7 of 10 proposed tokens come true, one draft in 37 is the third in a row to fail at once.
_MISSES = 3


@dataclass(slots=True)
class DraftPace:
    """Of one request. Token counts are those of its output."""

    reach: int
    """So many proposals are worth their rows."""
    _misses: int = 0
    _again_at: int = 0

    def allowed(self, output_tokens: int) -> int:
        """How many tokens may be proposed behind so many."""
        return self.reach if output_tokens >= self._again_at else 0

    def note(self, proposed: int, agreed: int, output_tokens: int, longest: int) -> None:
        """Of a draft behind `output_tokens` tokens, the first `agreed` came true."""
        if agreed:
            self.reach = (
                min(longest, self.reach + 1)
                if agreed == proposed
                else max(agreed + 1, self.reach - 1)
            )
            self._misses = 0
            return
        self.reach = max(1, self.reach // 2)
        self._misses += 1
        if self._misses >= _MISSES:
            self._again_at = output_tokens + min(2 ** (self._misses - _MISSES + 1), _LONGEST_WAIT)


ROWS = 64
"""Sampled rows of a step with proposals at most. Up to about so many a step of a large model takes
as long as its weights take to be read (an H200, 8B in bf16: 4.0 ms for 1 row, 5.9 for 40, but 10.3
for 160).
"""


@dataclass(slots=True)
class Speculation:
    """At most `tokens` proposals per request and step (0: none), by n-grams of `longest` down to
    `shortest` tokens.
    """

    tokens: int = 0
    longest: int = 1
    shortest: int = 1
    can_speculate: Callable[[Request], bool] = field(default=lambda request: True)
    """Whether the sampler of this device can draw several rows of the request at once."""
    drafts: int = 0
    """Chunks with proposals whose draws are known."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """Of these, those at each place of a proposal."""

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.tokens

    def proposals(self, request: Request, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow the known ones of a request that decodes."""
        limit = min(limit, self.tokens, request.params.max_tokens - request.output_tokens - 1)
        if request.draft_pace is not None:
            limit = min(limit, request.draft_pace.allowed(request.output_tokens))
        if limit <= 0 or not self.can_speculate(request):
            return ()
        if request.lookup is None:
            request.lookup, request.draft_pace = (
                NgramIndex(self.longest, self.shortest),
                DraftPace(self.tokens),
            )
        return tuple(request.lookup.propose(request.token_ids, limit))

    def with_proposals(
        self,
        chunks: Sequence[Chunk],
        rows: int,
        max_model_len: int,
        room_for: Callable[[Request, int], int],
    ) -> list[Chunk]:
        """A step's chunks with up to `rows` proposals behind decodes all of whose tokens are known,
        in equal shares.

        The last token of a context is never computed. `room_for(request, tokens)` makes room for
        the KV of the first `tokens` tokens and says for how many there is room.
        """
        extended = []
        rows = min(rows, ROWS - len(chunks))
        for at, chunk in enumerate(chunks):
            request, end = chunk.request, chunk.start + 1
            if chunk.samples and chunk.count == 1 and not request.num_pending:
                share = -(-rows // (len(chunks) - at))
                proposals = self.proposals(request, min(share, max_model_len - 1 - end))
                proposals = proposals[: room_for(request, end + len(proposals)) - end]
                chunk = replace(chunk, count=1 + len(proposals), proposals=proposals)
                rows -= len(proposals)
            extended.append(chunk)
        return extended

    def needs_tokens(self, running: Sequence[Request], seats: int) -> bool:
        """Whether proposals depend on tokens under way: after others, or behind a text that
        suggests some.
        """
        suggests = self.tokens > 0 and len(running) < min(seats, ROWS)
        return any(
            r.proposals or (suggests and r.num_pending and self.proposals(r, 1)) for r in running
        )

    def accept(self, request: Request, drawn: Sequence[int]) -> Sequence[int]:
        """Of the tokens drawn at the rows of a launched chunk, those that are the request's. Ends
        its proposals.
        """
        proposals, request.proposals = request.proposals, ()
        agreed = 0
        while agreed < len(proposals) and drawn[agreed] == proposals[agreed]:
            agreed += 1
        if proposals:
            self.drafts += 1
            self.draft_tokens += len(proposals)
            self.accepted_tokens += agreed
            for place in range(agreed):
                self.accepted_at[place] += 1
            request.draft_tokens += len(proposals)
            request.accepted_tokens += agreed
            if request.draft_pace is not None:
                request.draft_pace.note(
                    len(proposals), agreed, request.output_tokens + agreed + 1, self.tokens
                )
        return drawn[: agreed + 1]
