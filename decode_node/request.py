"""A decode node's part of a request: from the tokens generated elsewhere to the end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from kvrelay.kv_transfer.tickets import MAX_ID_CHARS
from kvrelay.openai_api.logprobs import ScoredPrompt
from kvrelay.openai_api.node_request import NodeRequest, fork_submits
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.engine_messages import EngineReady, RequestUpdate, Submit
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import KV_GROUPS, KvTransferParams, Ticket

__all__ = ["DecodeRequest", "check_ticket"]

_MAX_INT = 2**63


def check_ticket(ticket: Ticket, block_size: int) -> None:
    wanted = (
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "generation",
    )
    missing = [name for name in wanted if not getattr(ticket, name)]
    if missing or ticket.num_tokens <= 0:
        raise RequestError(
            f"kv_transfer_params lacks {', '.join(missing) or 'num_tokens'}; pass on what the "
            f"prefill node answered",
            param="kv_transfer_params",
        )
    blocks = -(-ticket.num_tokens // block_size)
    if ticket.blocks_each() != blocks:
        raise RequestError(
            f"remote_block_ids must be {KV_GROUPS} list of {blocks} block numbers for "
            f"{ticket.num_tokens} tokens in blocks of {block_size}; the prefill node must have the "
            f"same block_size",
            param="kv_transfer_params",
        )
    if (
        not 0 < ticket.remote_port < 65536
        or not 0 <= ticket.lease_epoch < _MAX_INT
        or len(ticket.remote_request_id) > MAX_ID_CHARS
    ):
        raise RequestError(
            "remote_port, lease_epoch or the length of remote_request_id is out of range",
            param="kv_transfer_params",
        )


class DecodeRequest(NodeRequest):
    """A decode request: goes on from the choices that `writer` has replayed.

    The first choice that is not over fetches the KV or computes it; the others fork from it.
    """

    def __init__(
        self,
        submit: Submit,
        answer: KvTransferParams,
        writer: AnswerWriter,
        info: EngineReady,
    ) -> None:
        ticket = answer.ticket()
        if ticket is not None:
            check_ticket(ticket, info.block_size)
        prompt_tokens = len(submit.prompt_token_ids)
        if ticket is not None and ticket.num_tokens != prompt_tokens:
            raise RequestError(
                f"the prefill node holds KV of {ticket.num_tokens} tokens, the prompt has "
                f"{prompt_tokens}; both requests must carry the same prompt",
                param="kv_transfer_params",
            )
        if answer.prompt_logprobs is not None:
            scored = ScoredPrompt(submit.prompt_token_ids, answer.prompt_logprobs)
            writer.beginning.scored_prompt = scored
            own = replace(submit.params, prompt_logprobs=None)
            submit = replace(submit, params=own)
        elif ticket is not None and submit.params.prompt_logprobs is not None:
            raise RequestError(
                "the prefill node computes the log-probabilities of the prompt, and "
                "kv_transfer_params lacks its prompt_logprobs; pass on what it answered",
                param="kv_transfer_params",
            )
        self._ends: dict[int, Finish] = {}  # of choices whose client does not know that they ended
        going_on: dict[int, list[int]] = {}
        for at, choice in enumerate(answer.so_far(len(writer.choices))):
            if choice.finish is not None:
                continue
            over = _over(
                submit.params, choice.generated, writer.choices[at].stopped, info.eos_token_ids
            )
            if over is None:
                going_on[at] = choice.generated
            else:
                self._ends[at] = over
        first = replace(submit, fetch=ticket)
        super().__init__(fork_submits(first, going_on), writer)
        if ticket is not None and not going_on:
            self.unneeded = first

    def opening_frames(self, load: Load) -> Iterator[Frame]:
        """Yield ends that the client does not know (after a fail-over), and text that it lacks."""
        nothing = RequestUpdate("", [])
        for at, choice in enumerate(self.writer.choices):
            if choice.ended:
                continue
            if at in self._ends:
                yield self.ended(
                    at, self.writer.end(at, self._ends[at]), nothing, self._ends[at], load
                )
            elif unsent := self.writer.tokens(at, []):
                yield self.tokens(at, unsent, nothing, None, load)
        if self.writer.ended and self.finish is None:
            self.finish = Finish.STOP  # its client knows all but the very end
            yield Frame(FrameKind.END, self.writer.close(), load=load, usage=self.writer.counts)


def _over(
    params: SamplingParams, generated: Sequence[int], stopped: bool, eos_token_ids: Collection[int]
) -> Finish | None:
    if stopped:
        return Finish.STOP
    if generated and (
        generated[-1] in params.stop_token_ids
        or (generated[-1] in eos_token_ids and not params.ignore_eos)
    ):
        return Finish.STOP
    return Finish.LENGTH if len(generated) >= params.max_tokens else None
