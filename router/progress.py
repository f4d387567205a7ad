"""How far an answer is, seen from its frames, and what the next leg must be told. Pure.

The rule that it keeps: no token is lost or doubled. What the client has seen is never computed again with another
outcome; what it has not seen may be. Two legs may tell of the same token: the decode leg that has begun with the ticket
tells of all, the prefill leg of the first. Whoever comes first is passed on.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.job import Job
from wire.errors import NodeFailed
from wire.frames import Frame, FrameKind
from wire.transfer import KvTransferParams

__all__ = ["Diverged", "Place", "Progress"]


class Diverged(Exception):
    """A decode leg tells of other tokens than the client has seen."""


@dataclass(slots=True)
class Place:
    """How far one leg is: tokens of the answer up to its next frame."""

    at: int = 0
    decoding: bool = False


class Progress:
    """The state of one answer across all of its legs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.ticket: KvTransferParams | None = None
        self.handover: KvTransferParams | None = None
        self.token_ids: list[int] = []
        self.sent_text: int | None = None
        self.forwarded = False
        """The client was given bytes."""
        self.settled = False
        """A decode leg has shown that it needs the prefill node's KV no more."""
        self.ended = False
        self._kept = 0  # of token_ids, those that a re-binding starts from
        self._seen = 0  # of token_ids, those up to which the client was given bytes
        self._diverged = False

    def take(self, frame: Frame, place: Place) -> bool:
        """Count a frame of the leg at `place`; whether its payload is news to the client.

        Raises Diverged if a decode leg tells of other tokens than those that are known.
        """
        begin, place.at = place.at, place.at + len(frame.token_ids)
        if frame.kind is FrameKind.TICKET:
            self.ticket = frame.params
            return False
        if frame.kind is FrameKind.HANDOVER and frame.params is not None:
            self._take_handover(frame.params)
            self.forwarded |= bool(frame.payload)
            return True
        if frame.kind not in (FrameKind.TOKENS, FrameKind.END) or self.ended:
            return False
        over = frame.kind is FrameKind.END
        self.settled |= place.decoding and (over or bool(frame.token_ids))
        if begin < len(self.token_ids):
            # In 16 bits a prompt that is computed twice may have two first tokens. The client's counts.
            same = not over and self.token_ids[begin : place.at] == frame.token_ids
            if place.decoding and not same:
                self._diverged = True
                raise Diverged(f"token {begin} of the answer is another one than the client has")
            return False
        self.token_ids += frame.token_ids
        self.ended = over
        if not over and (frame.token_ids or frame.payload):
            self.sent_text = frame.sent_text
        if frame.payload:
            self.forwarded, self._seen = True, len(self.token_ids)
        return True

    def _take_handover(self, params: KvTransferParams) -> None:
        known = self.token_ids[: len(params.generated)]
        if known and known != params.generated[: len(known)]:
            self._diverged = True  # a decode leg has told of another first token, and the client may have it
            return
        self.handover = params
        self._kept = len(params.generated)
        # A decode leg that has begun with the ticket may be further already.
        if len(self.token_ids) <= self._kept:
            self.token_ids, self.sent_text = list(params.generated), params.sent_text

    def start_over(self) -> bool:
        """Forget a broken prefill leg; False if the client has already seen a part of it."""
        if self.forwarded:
            return False
        self.token_ids, self.sent_text, self.handover, self.ticket, self._seen = [], None, None, None, 0
        return True

    def decode_params(self) -> KvTransferParams:
        """What the next decode leg starts from: the hand-over itself, or the ticket, or all tokens so far.

        Raises NodeFailed if the client has seen more than the hand-over and token ids alone cannot continue it.
        """
        if self.handover is not None and self._seen <= self._kept:
            if len(self.token_ids) == self._kept:
                return self.handover
            if not self._job.resumable:
                self.token_ids, self.sent_text = self.token_ids[: self._kept], self.handover.sent_text
                return self.handover
        if self.handover is None and self.ticket is not None and not self._diverged:
            if len(self.token_ids) <= 1:
                return self.ticket  # it will tell of the first token again
            if not self._job.resumable and not self._seen:
                self.token_ids, self.sent_text = [], None
                return self.ticket
        if not self._job.resumable:
            raise NodeFailed(
                "a node broke after a part of the answer was sent, and an answer with logprobs or several choices "
                "cannot be continued on another; send the request again"
            )
        return self._resume()

    def tokens_to_compute(self, params: KvTransferParams) -> int:
        """Tokens that a decode node must compute for `params` before it can go on: none where KV is handed over."""
        if params.remote_engine_id is not None:
            return 0
        prompt = self._job.prompt_tokens if params.prompt_token_ids is None else len(params.prompt_token_ids)
        return prompt + len(params.generated)

    def _resume(self) -> KvTransferParams:
        base = (
            self.handover
            or self.ticket
            or KvTransferParams(
                do_remote_prefill=True,
                client_max_tokens=self._job.max_tokens,
                created=self._job.created,
                seed=self._job.seed,
            )
        )
        return msgspec.structs.replace(
            base,
            remote_engine_id=None,
            remote_block_ids=None,
            remote_request_id=None,
            remote_host=None,
            remote_port=None,
            generation=None,
            num_tokens=0,
            growing=False,
            generated=list(self.token_ids),
            sent_text=self.sent_text,
        )
