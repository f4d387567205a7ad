"""The progress of one answer, and what the next request to a node must be told. Pure.

What the client has seen is never computed again with another result. If prefill and decode request
send the same token, the first counts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from kvrelay.router.request.job import Job, begun
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

__all__ = ["Diverged", "FramePosition", "AnswerProgress"]


class Diverged(Exception):
    """A decode request sends other tokens than the client has seen."""


@dataclass(slots=True)
class FramePosition:
    at: dict[int, int] = field(default_factory=dict)
    decoding: bool = False

    @classmethod
    def behind(cls, params: KvTransferParams) -> FramePosition:
        known = {choice: len(each.generated) for choice, each in enumerate(params.choices)}
        return cls(known, decoding=True)


class AnswerProgress:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.told: KvTransferParams | None = None
        """The newest report of a prefill node: its ticket, then its hand-over."""
        self.forwarded = False
        self.ended = False
        self.output_tokens = 0
        self._choices = defaultdict(ChoiceSoFar, {0: ChoiceSoFar()})
        self._diverged = False

    def take(self, frame: Frame, place: FramePosition) -> bool:
        """Count a frame, and return whether its payload is news to the client.

        Raises Diverged.
        """
        ids, kind = frame.token_ids, frame.kind
        begin = place.at.get(frame.choice, 0)
        place.at[frame.choice] = begin + len(ids)
        if kind is FrameKind.TICKET:
            self.told = frame.params
            return False
        if kind is FrameKind.HANDOVER and frame.params is not None:
            self._take_handover(frame.params)
            self.forwarded |= bool(frame.payload)
            return True
        over = kind is FrameKind.END
        if not (over or kind is FrameKind.TOKENS) or self.ended:
            return False
        choice = self._choices[frame.choice]
        says = bool(ids) or frame.finish is not None
        if begin < len(choice.generated) or (says and choice.finish is not None):
            # In 16 bits a prompt computed twice may have two first tokens. The client's counts.
            if place.decoding and (over or not _is_known(frame, begin, choice)):
                self._diverged = True
                raise Diverged(
                    f"token {begin} of choice {frame.choice} of the answer is another one than "
                    f"the client has"
                )
            return False
        choice.generated += ids
        self.output_tokens += len(ids)
        if frame.logprobs:
            choice.logprobs += frame.logprobs
        if frame.finish is not None and choice.finish is None:
            choice.finish = frame.finish
        if says or frame.payload:
            choice.sent_text = frame.sent_text
        if over and frame.usage is not None:  # a node that does not number tokens
            self.output_tokens = max(self.output_tokens, frame.usage[1])
        self.ended = over
        if frame.payload:
            self.forwarded = True
        return True

    def _take_handover(self, params: KvTransferParams) -> None:
        if params.prompt_tokens is None and self.told is not None:
            params = msgspec.structs.replace(
                params,
                prompt_token_ids=self.told.prompt_token_ids,
                packed_prompt=self.told.packed_prompt,
            )
        first, told = self._choices[0], params.choices[0]
        known = first.generated[: len(told.generated)]
        if known != told.generated[: len(known)]:
            self._diverged = True  # the client may have the first token of a decode request
            return
        self.told = params
        # A decode leg begun with the ticket may be further already.
        if len(first.generated) <= len(told.generated):
            self.output_tokens += len(told.generated) - len(first.generated)
            self._choices[0] = _copied(told)

    def decode_params(self) -> KvTransferParams:
        """Return where the next decode request starts: hand-over, ticket, or all tokens so far."""
        told, known = self.told, len(self._choices[0].generated)
        others = any(choice.generated for at, choice in self._choices.items() if at)
        if told is None or others:
            return self.without_kv()
        first_again = not told.generated and known == 1 and not self._diverged
        return told if first_again or known == len(told.generated) else self.without_kv()

    def without_kv(self) -> KvTransferParams:
        """Return the start of a decode request that computes everything itself."""
        told = self.told or begun(self._job, prefill=False)
        choices = [_copied(self._choices[at]) for at in range(max(self._choices) + 1)]
        return told.with_ticket(None).with_choices(choices)


def _copied(choice: ChoiceSoFar) -> ChoiceSoFar:
    return msgspec.structs.replace(
        choice, generated=[*choice.generated], logprobs=[*choice.logprobs]
    )


def _is_known(frame: Frame, begin: int, choice: ChoiceSoFar) -> bool:
    end = begin + len(frame.token_ids)
    if frame.finish is not None and (
        frame.finish is not choice.finish or end != len(choice.generated)
    ):
        return False
    return choice.generated[begin:end] == frame.token_ids
