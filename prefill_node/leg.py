"""A prefill node's part of a request: one token, then a hand-over, unless that token ends the request.

To a router that asks for it the ticket goes out before the prompt is computed, so that a decode node makes room and
reads what is there while the rest is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from openai_api.leg import Leg
from openai_api.writer import AnswerWriter
from wire.engine_messages import RequestUpdate, Submit
from wire.frames import Frame, FrameKind
from wire.outputs import Finish, Load
from wire.sampling import SamplingParams
from wire.transfer import KvTransferParams

__all__ = ["PrefillLeg"]


class PrefillLeg(Leg):
    """`asked` are the request's kv_transfer_params, `writer` was made for the client's whole request.

    `ends_here`: the client wants one token only (the contract's max_tokens=1 says nothing of that).
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        asked: KvTransferParams,
        writer: AnswerWriter,
        cache_salt: str | None,
        *,
        ends_here: bool,
    ) -> None:
        submit = Submit(
            request_id,
            prompt_token_ids,
            msgspec.structs.replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1)),
            cache_salt=cache_salt,
            hold=not ends_here,
        )
        super().__init__(submit, writer)
        self._asked = asked

    def frames(self, update: RequestUpdate, load: Load) -> Iterator[Frame]:
        """A ticket that comes before the end is the news of an update that has no other."""
        if update.held is None or update.finish is not None:
            yield from super().frames(update, load)
        elif self._asked.pipelined:
            early = msgspec.structs.replace(self._params(update), sent_text=None)
            yield Frame(FrameKind.TICKET, params=early, load=load)

    def last_frames(self, payload: bytes, update: RequestUpdate, load: Load) -> Iterator[Frame]:
        """The request goes on at a decode node, unless its first token has ended it."""
        if not self.submit.hold or update.finish is not Finish.LENGTH:
            yield from super().last_frames(payload, update, load)
            return
        if payload or update.token_ids:
            yield self.tokens(payload, update)
        self.done = True
        self.finish = update.finish
        yield Frame(
            FrameKind.HANDOVER,
            sent_text=self.writer.sent_text,
            params=self._params(update),
            load=load,
            timing=self.stages(update),
        )

    def _params(self, update: RequestUpdate) -> KvTransferParams:
        """The engine's ticket, and beside it all that the decode node would otherwise compute again.

        Without a ticket (its lease was ended while the prompt was computed) the decode node computes the prompt."""
        return msgspec.structs.replace(
            update.held or KvTransferParams(do_remote_prefill=True),
            created=self._asked.created,
            prompt_token_ids=self.submit.prompt_token_ids,
            generated=update.token_ids,
            generated_logprobs=update.logprobs or [],
            sent_text=self.writer.sent_text,
            seed=self.submit.params.seed,
            cached_tokens=update.cached_tokens,
        )
