"""A prefill node's part of a request: one token, then a hand-over unless that token ends it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.engine_messages import RequestUpdate, Submit
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.transfer import KvTransferParams, packed

__all__ = ["PrefillRequest"]


class PrefillRequest(NodeRequest):
    """A prefill request: the first choice alone, since the others start where they go on."""

    def __init__(
        self,
        submit: Submit,
        asked: KvTransferParams,
        writer: AnswerWriter,
    ) -> None:
        params = submit.params
        params = replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
        several = len(writer.choices) > 1
        super().__init__(
            [replace(submit, params=params, hold=True, hold_stopped=several)],
            writer,
        )
        self._several, self._asked, self._prompt_told = several, asked, False

    def frames(self, update: RequestUpdate, load: Load) -> Iterator[Frame]:
        self.blocks, self.found = update.blocks or self.blocks, update.found or self.found
        if update.held is None or update.finish is not None:
            yield from super().frames(update, load)
        elif self._asked.pipelined and self.submits[0].params.prompt_logprobs is None:
            early = replace(
                self._params(update, None),
                sent_text=None,
                prompt_token_ids=None,
                packed_prompt=packed(self.submits[0].prompt_token_ids),
            )
            self._prompt_told = True
            yield Frame(
                FrameKind.TICKET, params=early, load=load, blocks=update.blocks, found=self.found
            )

    def last_frames(
        self, choice: int, payload: bytes, update: RequestUpdate, finish: Finish, load: Load
    ) -> Iterator[Frame]:
        over = finish is not Finish.LENGTH
        if over and not self._several:
            yield from super().last_frames(choice, payload, update, finish, load)
            return
        if over:
            payload += self.writer.end(choice, finish)
        if payload or update.token_ids:
            yield self.tokens(choice, payload, update, finish if over else None, load)
        self.finish = Finish.LENGTH
        yield Frame(
            FrameKind.HANDOVER,
            sent_text=self.writer.choices[choice].sent_text,
            params=self._params(update, finish if over else None),
            load=load,
            timing=self.stages(update),
            found=self.found,
        )

    def _params(self, update: RequestUpdate, finish: Finish | None) -> KvTransferParams:
        # Without a ticket (its lease was ended while the prompt was computed) the decode node
        # computes the prompt.
        scored = self.writer.beginning.scored_prompt
        return KvTransferParams(
            do_remote_prefill=True,
            created=self._asked.created,
            part=self._asked.part,
            first_index=self._asked.first_index,
            seed=self.submits[0].params.seed,
            # Once: a router takes longer to read and write them than for all else in a request.
            prompt_token_ids=None if self._prompt_told else self.submits[0].prompt_token_ids,
            generated=update.token_ids,
            generated_logprobs=update.logprobs or [],
            sent_text=self.writer.choices[0].sent_text,
            finish=finish,
            cached_tokens=update.cached_tokens,
            prompt_logprobs=None if scored is None else list(scored.entries),
            sampling_defaults=self._asked.sampling_defaults,
        ).with_ticket(update.held)
