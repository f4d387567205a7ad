"""One node's part of one request: what to submit to the engine, and how its updates become frames.

The base class serves a request to its end; prefill_node/leg.py ends it with a hand-over instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from openai_api.stages import stages_ms
from openai_api.writer import AnswerWriter
from wire.engine_messages import RequestUpdate, Submit, Timing
from wire.errors import KvNotLoaded, KvrelayError, NodeFailed, RequestError
from wire.frames import Frame, FrameKind
from wire.outputs import Finish, Load

__all__ = ["Leg"]


class Leg:
    """`done` once the last frame was made, also when the engine has not ended the request (a stop string was hit)."""

    def __init__(self, submit: Submit, writer: AnswerWriter) -> None:
        self.submit = submit
        self.writer = writer
        self.done = False
        self.finish: Finish | None = None
        self.timing: Timing | None = None
        """The newest from the engine."""

    def opening_frame(self) -> Frame | None:
        """What can be said before the engine is asked. If it ends the leg, the engine never is."""
        return None

    def frames(self, update: RequestUpdate, load: Load) -> Iterator[Frame]:
        """The frames of one engine update. Raises what ended the request: NodeFailed, KvNotLoaded, RequestError."""
        if update.finish is Finish.ERROR:
            why = update.error or "the engine gave the request up"
            if update.refused:
                raise RequestError(why)
            raise KvNotLoaded(why) if update.fetch_error is not None else NodeFailed(why)
        self.timing = update.timing or self.timing
        if not self.submit.generated and self.submit.fetch is None:
            self.writer.cached_tokens = update.cached_tokens  # a hand-over brings the prefill node's number instead
        payload = self.writer.tokens(update.token_ids, update.logprobs)
        if self.writer.stopped:
            yield self._end(payload, update, Finish.STOP, load)
        elif update.finish is not None:
            yield from self.last_frames(payload, update, load)
        else:
            yield self.tokens(payload, update)

    def last_frames(self, payload: bytes, update: RequestUpdate, load: Load) -> Iterator[Frame]:
        """The engine ended the request: so does this leg."""
        assert update.finish is not None
        yield self._end(payload, update, update.finish, load)

    def tokens(self, payload: bytes, update: RequestUpdate) -> Frame:
        """A frame that is not the last."""
        return Frame(FrameKind.TOKENS, payload, token_ids=update.token_ids, sent_text=self.writer.sent_text)

    def error(self, why: KvrelayError) -> Frame:
        """The leg broke."""
        self.done = True
        self.finish = Finish.ERROR
        return Frame(FrameKind.ERROR, self.writer.error(why), status=why.status, error=why.body())

    def _end(self, payload: bytes, update: RequestUpdate, finish: Finish, load: Load | None) -> Frame:
        self.done = True
        self.finish = finish
        return Frame(
            FrameKind.END,
            payload + self.writer.end(finish),
            token_ids=update.token_ids,
            sent_text=self.writer.sent_text,
            load=load,
            timing=self.stages(update),
        )

    def stages(self, update: RequestUpdate) -> dict[str, float] | None:
        """Milliseconds of each stage inside the engine, at the last update."""
        if self.timing is None:
            return None
        stages = stages_ms(self.timing)
        if update.timing is None:
            stages.pop("decode", None)  # a stop string has ended it: the engine has not said how long it took
        return stages
