"""Speculative decoding by prompt lookup: propose tokens, and accept those that were drawn. Pure.

A decode chunk with k proposals samples 1 + k rows. A draw depends on seed, choice and token index,
so answers stay the same. Source: Apoorv Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvrelay.paged_engine.request import Chunk, Request

__all__ = ["NgramIndex", "ROWS", "Speculation"]

# Indexing a long prompt at once would take more than a millisecond.
_INDEXED_PER_CALL = 2048


class NgramIndex:
    """An index from n-grams of a growing text to what followed them last."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        # n-gram -> place behind its newest occurrence
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest matching n-gram.

        `tokens` may only have grown since the last call.
        """
        until = min(len(tokens), self._indexed + _INDEXED_PER_CALL)
        for end in range(self._indexed, until):
            for n in range(self._shortest, min(self._longest, end) + 1):
                self._follower[tuple(tokens[end - n : end])] = end
        self._indexed = until
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            place = self._follower.get(tuple(tokens[-n:]))
            if place is not None:
                # Short loops go on.
                period = len(tokens) - place
                return [tokens[place + i % period] for i in range(count)]
        return []


_LONGEST_WAIT = 64  # tokens
ROWS = 64
"""Most sampled rows of a step with proposals: up to there reading weights takes longer.

An H200, 8B in bf16: 4.0 ms for 1 row, 5.9 for 40, 10.3 for 160.
"""


@dataclass(slots=True)
class Speculation:
    """A proposer of at most `tokens` tokens, by n-grams of `longest` to `shortest`."""

    tokens: int = 0
    longest: int = 1
    shortest: int = 1
    can_speculate: Callable[[Request], bool] = lambda request: True
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def proposals(self, request: Request, limit: int) -> tuple[int, ...]:
        limit = min(limit, self.tokens, request.params.max_tokens - request.output_tokens - 1)
        waits = request.output_tokens < request.no_draft_before
        if limit <= 0 or waits or not self.can_speculate(request):
            return ()
        if request.lookup is None:
            request.lookup = NgramIndex(self.longest, self.shortest)
        return tuple(request.lookup.propose(request.token_ids, limit))

    def with_proposals(
        self,
        chunks: Sequence[Chunk],
        rows: int,
        max_model_len: int,
        room_for: Callable[[Request, int], int],
    ) -> list[Chunk]:
        """Return chunks with up to `rows` proposals behind decodes, in equal shares.

        `room_for(request, tokens)` makes room for KV and says how many tokens fit.
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
        suggests = self.tokens > 0 and len(running) < min(seats, ROWS)
        return any(
            r.proposals or (suggests and r.num_pending and self.proposals(r, 1)) for r in running
        )

    def accept(self, request: Request, drawn: Sequence[int]) -> Sequence[int]:
        """Return the tokens drawn up to the first that is not the request's proposal."""
        proposals, request.proposals = request.proposals, ()
        agreed = 0
        while agreed < len(proposals) and drawn[agreed] == proposals[agreed]:
            agreed += 1
        self.drafts += 1
        self.draft_tokens += len(proposals)
        self.accepted_tokens += agreed
        request.draft_tokens += len(proposals)
        request.accepted_tokens += agreed
        request.failed_drafts = 0 if agreed else request.failed_drafts + 1
        # 0, 2, 6, 14 tokens and so on: with 32 requests drafts that all fail cost 58 % else.
        wait = min((1 << request.failed_drafts) - 2, _LONGEST_WAIT)
        request.no_draft_before = request.output_tokens + agreed + 1 + wait
        return drawn[: agreed + 1]
