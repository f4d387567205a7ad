"""A decode node's part of a request: from the tokens that were generated elsewhere to the end."""

from __future__ import annotations

from openai_api.writer import AnswerWriter

from openai_api.leg import Leg
from wire.engine_messages import Submit
from wire.errors import RequestError
from wire.sampling import SamplingParams
from wire.transfer import KvTransferParams

__all__ = ["DecodeLeg", "ticket_of"]


def ticket_of(params: KvTransferParams) -> KvTransferParams | None:
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
    ) -> None:
        ticket = ticket_of(params)
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
