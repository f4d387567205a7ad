"""When a request's tokens end it. Pure; what becomes of its blocks then is the scheduler's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvrelay.paged_engine.request import Request
from kvrelay.wire.outputs import Finish

__all__ = ["Endings"]


@dataclass(frozen=True, slots=True)
class Endings:
    """Of one model in one context length."""

    eos: Collection[int]
    max_model_len: int

    def before(self, request: Request) -> Finish | None:
        """Why a request ends without the token that was just drawn: no token may follow, and it was
        drawn of all.
        """
        if request.guide is None or not request.guide.spent:
            return None
        return Finish.STOP if request.guide.error is None else Finish.ERROR

    def over(self, request: Request) -> Finish | None:
        """Why a request's newest token is its last one, if it is."""
        params, token_id, guide = request.params, request.token_ids[-1], request.guide
        if guide is not None:
            guide.follow(request.token_ids, request.prompt_tokens)
            if guide.error is not None:
                return Finish.ERROR
            if guide.over:
                return Finish.STOP
        if token_id in params.stop_token_ids or (token_id in self.eos and not params.ignore_eos):
            return Finish.STOP
        if (
            request.output_tokens >= params.max_tokens
            or len(request.token_ids) >= self.max_model_len
        ):
            return Finish.LENGTH
        return None

    def awaited(self, request: Request) -> bool:
        """Whether nothing can be computed of it before its tokens under way are known.

        One of them is the last one, whatever it is; or some are only proposed, and which comes next
        is open.
        """
        outputs, total = request.output_tokens, len(request.token_ids)
        pending = request.num_pending
        return bool(request.proposals) or (
            pending > 0
            and (
                outputs + pending >= request.params.max_tokens
                or total + pending >= self.max_model_len
            )
        )
