"""A decode node's part of a request: from the tokens that were generated elsewhere to the end."""

from __future__ import annotations

from collections.abc import Collection

from openai_api.leg import Leg
from openai_api.writer import AnswerWriter
from wire.engine_messages import EngineReady, RequestUpdate, Submit
from wire.errors import RequestError
from wire.frames import Frame
from wire.outputs import Finish
from wire.sampling import SamplingParams
from wire.transfer import KvTransferParams

__all__ = ["DecodeLeg", "ticket_of"]

_MAX_INT = 2**63


def ticket_of(params: KvTransferParams, block_tokens: int) -> KvTransferParams | None:
    """The claim on KV elsewhere, or None if there is none (after a fail-over) and the prompt is computed here.

    Raises RequestError for a claim that lacks a part.
    """
    if params.remote_request_id is None and params.remote_engine_id is None:
        return None
    wanted = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids", "generation")
    missing = [name for name in wanted if not getattr(params, name)]
    if missing or params.num_tokens <= 0:
        raise RequestError(
            f"kv_transfer_params lacks {', '.join(missing) or 'num_tokens'}; pass on what the prefill node answered",
            param="kv_transfer_params",
        )
    blocks = -(-params.num_tokens // block_tokens)
    groups = params.remote_block_ids or []
    if len(groups) != 1 or len(groups[0]) != blocks or not all(0 < block < _MAX_INT for block in groups[0]):
        raise RequestError(
            f"remote_block_ids must be one list of {blocks} block ids for {params.num_tokens} tokens in blocks of "
            f"{block_tokens}; the prefill node must have the same block_tokens",
            param="kv_transfer_params",
        )
    if not 0 < (params.remote_port or 0) < 65536 or not 0 <= params.lease_epoch < _MAX_INT:
        raise RequestError("remote_port or lease_epoch is out of range", param="kv_transfer_params")
    return params


class DecodeLeg(Leg):
    """The writer has replayed `params.generated` already; the engine starts behind them."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        params: KvTransferParams,
        writer: AnswerWriter,
        cache_salt: str | None,
        info: EngineReady,
    ) -> None:
        ticket = ticket_of(params, info.block_tokens)
        if ticket is not None and ticket.num_tokens != len(prompt_token_ids):
            raise RequestError(
                f"the prefill node holds KV of {ticket.num_tokens} tokens, the prompt has {len(prompt_token_ids)}; "
                "both legs must carry the same prompt",
                param="kv_transfer_params",
            )
        submit = Submit(
            request_id,
            prompt_token_ids,
            sampling,
            generated=list(params.generated),
            cache_salt=cache_salt,
            fetch=ticket,
        )
        super().__init__(submit, writer)
        self._over = _already_over(submit, writer, info.eos_token_ids)

    def opening_frame(self) -> Frame | None:
        """The end, if the last generated token was one; else what the client has not seen of the generated text.

        The first happens after a fail-over, the second behind a proxy that delivers no first token itself.
        """
        update = RequestUpdate(self.submit.request_id, [])
        if self._over is not None:
            return self._end(b"", update, self._over, None)
        unsent = self.writer.tokens([])
        return self.tokens(unsent, update) if unsent else None


def _already_over(submit: Submit, writer: AnswerWriter, eos_token_ids: Collection[int]) -> Finish | None:
    params, generated = submit.params, submit.generated
    if writer.stopped:
        return Finish.STOP
    if generated and (
        generated[-1] in params.stop_token_ids or (generated[-1] in eos_token_ids and not params.ignore_eos)
    ):
        return Finish.STOP
    return Finish.LENGTH if len(generated) >= params.max_tokens else None
