"""One leg over HTTP on a vLLM node: OpenAI's bytes, whole or as events. Decides nothing about
retries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from kvrelay.openai_api.sse import DONE
from kvrelay.router.nodes.node import Lease
from kvrelay.router.request.vllm_bodies import error_in
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_errors import AttemptFailed, error_of_status

__all__ = ["PutEvents", "VllmLegs"]

PutEvents = Callable[[bytes], Awaitable[None]]
"""Given whole events in order; may wait until the client has room for more."""

_MAX_ANSWER_BYTES = 64 << 20


class VllmLegs:
    """The HTTP client side towards vLLM nodes."""

    def __init__(self, legs: NodeClient) -> None:
        self._legs = legs
        self.without_forced_tools: set[tuple[str, str]] = set()
        """Processes of prefill nodes, by URL and generation, that fail on a forced tool call of one
        token.
        """

    async def whole(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]
    ) -> bytes:
        """Return the body of a 200 answer. Raises AttemptFailed, Refused.

        Cancelling closes the connection, which aborts the request on the node; so for `events`.
        """
        async with self._legs.posted(lease, path, body, headers) as answer:
            held = bytearray()
            while chunk := await answer.content.readany():
                held += chunk
                if len(held) > _MAX_ANSWER_BYTES:
                    raise AttemptFailed(
                        f"the node's answer is longer than {_MAX_ANSWER_BYTES} bytes"
                    )
            return bytes(held)

    async def events(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], put: PutEvents
    ) -> None:
        """Pass on a stream's events, each whole, to its [DONE]. Raises AttemptFailed, Refused.

        An event that tells of an error is raised, not passed on.
        """
        async with self._legs.posted(lease, path, body, headers) as answer:
            if answer.content_type != "text/event-stream":
                raise AttemptFailed(f"the node answered a stream with {answer.content_type}")
            held = b""
            while chunk := await answer.content.readany():
                last, end, held = (held + chunk).rpartition(b"\n\n")
                if len(held) > _MAX_ANSWER_BYTES:
                    raise AttemptFailed(
                        f"the node sent an event of more than {_MAX_ANSWER_BYTES} bytes"
                    )
                if not end:
                    continue
                events = last + end
                if (broke := error_in(events)) is not None:
                    at, error, status = broke
                    if at:
                        await put(events[:at])
                    raise error_of_status(status, error, None)
                await put(events)
                if events.endswith(DONE):
                    return
            raise AttemptFailed(
                f"the stream was cut before its end, {len(held)} bytes into an event"
            )
