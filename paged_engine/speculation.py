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

from kvrelay.paged_engine.draft_pace import DraftPace
from kvrelay.paged_engine.ngram import NgramIndex
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.step_plan import Chunk

__all__ = ["ROWS", "Speculation"]

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
    allows: Callable[[Request], bool] = field(default=lambda request: True)
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
        if limit <= 0 or not self.allows(request):
            return ()
        if request.lookup is None:
            request.lookup, request.draft_pace = (
                NgramIndex(self.longest, self.shortest),
                DraftPace(self.tokens),
            )
        return tuple(request.lookup.propose(request.token_ids, limit))

    def extended(
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

    def wants_tokens(self, running: Sequence[Request], seats: int) -> bool:
        """Whether proposals depend on tokens under way: after others, or behind a text that
        suggests some.
        """
        suggests = self.tokens > 0 and len(running) < min(seats, ROWS)
        return any(
            r.proposals or (suggests and r.num_pending and self.proposals(r, 1)) for r in running
        )

    def borne_out(self, request: Request, drawn: Sequence[int]) -> Sequence[int]:
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
