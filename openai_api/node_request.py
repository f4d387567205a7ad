"""One node's part of a request: engine requests, and updates as frames.

Each choice is an engine request; all but the first fork from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from kvrelay.openai_api.logprobs import ScoredPrompt
from kvrelay.openai_api.stages import stages_ms
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.engine_messages import RequestUpdate, Submit, Timing
from kvrelay.wire.errors import KvNotLoaded, KvrelayError, NodeFailed, NotFound, RequestError
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.ladder import Found
from kvrelay.wire.outputs import Finish, Load, PromptBlocks
from kvrelay.wire.sampling import Constraint

__all__ = ["NodeRequest", "fork_submits"]


def fork_submits(first: Submit, generated: Mapping[int, Sequence[int]]) -> list[Submit]:
    """Return an engine request for each choice, with its output tokens.

    The first has `first`'s id and fetch; the others share its prompt.
    """
    submits: list[Submit] = []
    for choice, tokens in generated.items():
        params = replace(first.params, choice=choice)
        mine = replace(first, params=params, generated=list(tokens))
        if submits:
            # The first one reports on the prompt.
            mine = replace(
                mine,
                request_id=f"{first.request_id}.{choice}",
                params=replace(params, prompt_logprobs=None),
                fork_of=first.request_id,
                fetch=None,
                sources=[],
            )
        submits.append(mine)
    return submits


class NodeRequest:
    """A request on this node; `submits` are the choices that are not over."""

    def __init__(self, submits: Sequence[Submit], writer: AnswerWriter) -> None:
        self.submits = submits
        self.writer = writer
        self.finish: Finish | None = None
        """Set with the last frame."""
        self.timing: Timing | None = None
        """The newest from the engine, of the first choice."""
        self.unneeded: Submit | None = None
        """A request whose claim on KV elsewhere is to be given up."""
        self.blocks: PromptBlocks | None = None
        self.found: Found | None = None
        """The engine's, if the prompt is computed here."""
        self._kv_error: str | None = None  # empty once it was reported
        self._choice_of = {submit.request_id: submit.params.choice for submit in submits}
        self._live = set(self._choice_of)
        self._reports_load = True

    def constrain(self, constraint: Constraint) -> None:
        self.submits = [
            replace(each, params=replace(each.params, constraint=constraint))
            for each in self.submits
        ]

    def opening_frames(self, load: Load) -> Iterator[Frame]:
        return iter(())

    def over(self, request_id: str) -> bool:
        return request_id not in self._live

    def frames(self, update: RequestUpdate, load: Load) -> Iterator[Frame]:
        """Return the frames of an update. Raises NodeFailed, KvNotLoaded, RequestError."""
        if update.fetch_error is not None and self._kv_error is None:
            self._kv_error = update.fetch_error.partition(":")[0]
        if update.finish is Finish.ERROR:
            why = update.error or "the engine gave the request up"
            if update.lacks_adapter:
                raise NotFound(why, param="model", code="model_not_found")
            if update.refused:
                raise RequestError(why)
            raise KvNotLoaded(why) if update.fetch_error is not None else NodeFailed(why)
        first = self.submits[0]
        if update.request_id == first.request_id:
            self.timing = update.timing or self.timing
            self.blocks = update.blocks or self.blocks
            if (
                update.token_ids
                and first.params.prompt_logprobs is not None
                and self.writer.beginning.scored_prompt is None
            ):
                self.writer.beginning.scored_prompt = ScoredPrompt(
                    first.prompt_token_ids, update.prompt_logprobs or []
                )
            # Later it counts the answer, too.
            self.writer.pinned_tokens = self.writer.pinned_tokens or update.pinned_tokens
            if not first.generated and first.fetch is None:
                # A hand-over brings the prefill node's number instead.
                self.writer.cached_tokens = update.cached_tokens
                self.found = update.found or self.found
        choice = self._choice_of[update.request_id]
        payload = self.writer.tokens(choice, update.token_ids, update.logprobs)
        finish = Finish.STOP if self.writer.choices[choice].stopped else update.finish
        if finish is None:
            yield self.tokens(choice, payload, update, None, load)
            return
        self._live.discard(update.request_id)
        yield from self.last_frames(choice, payload, update, finish, load)

    def last_frames(
        self, choice: int, payload: bytes, update: RequestUpdate, finish: Finish, load: Load
    ) -> Iterator[Frame]:
        yield self.ended(choice, payload + self.writer.end(choice, finish), update, finish, load)

    def tokens(
        self, choice: int, payload: bytes, update: RequestUpdate, finish: Finish | None, load: Load
    ) -> Frame:
        """Return a frame about one choice; the first with tokens has the load."""
        reports_load = self._reports_load and bool(update.token_ids)
        self._reports_load = self._reports_load and not update.token_ids
        return Frame(
            FrameKind.TOKENS,
            payload,
            token_ids=update.token_ids,
            sent_text=self.writer.choices[choice].sent_text,
            load=load if reports_load else None,
            choice=choice,
            logprobs=update.logprobs,
            finish=finish,
            kv_error=self._new_kv_error(),
        )

    def ended(
        self, choice: int, payload: bytes, update: RequestUpdate, finish: Finish, load: Load
    ) -> Frame:
        """Return a frame about a choice's end, the last one if all have ended."""
        frame = self.tokens(choice, payload, update, finish, load)
        if not self.writer.ended:
            return frame
        self.finish = finish
        return replace(
            frame,
            kind=FrameKind.END,
            payload=payload + self.writer.close(),
            load=load,
            timing=self.stages(update),
            usage=self.writer.counts,
            # The next turn's prompt has no thoughts.
            blocks=None if self.writer.choices[0].message.thinks else self.blocks,
            found=self.found,
            written=self.writer.written_tokens,
        )

    def error(self, why: KvrelayError) -> Frame:
        self.finish = Finish.ERROR
        cause = self._new_kv_error()
        return Frame(
            FrameKind.ERROR,
            self.writer.error(why),
            status=why.status,
            error=why.body(),
            kv_error=cause,
        )

    def _new_kv_error(self) -> str:
        cause, self._kv_error = self._kv_error, self._kv_error and ""
        return cause or ""

    def stages(self, update: RequestUpdate) -> dict[str, float] | None:
        if self.timing is None:
            return None
        stages = stages_ms(self.timing)
        if update.timing is not self.timing or update.finish is None:
            # After a stop string, or with another choice as the last, the engine has not said.
            stages.pop("decode", None)
        return stages
