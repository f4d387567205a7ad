"""A node without HTTP: the same engine process, the same checks and answers, for a caller in this
process.

What `kvrelay batch` and the class LLM are made of.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kvrelay.node.app import Node, frames_of
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.loading import serving_of
from kvrelay.node.preprocess import legs_of
from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Call, Serving
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import ErrorBody, KvrelayError
from kvrelay.wire.frames import Frame, FrameKind

__all__ = ["AnswerBroke", "Offline", "offline"]


class AnswerBroke(KvrelayError):
    """An answer that ended with an error; `status` is what a client would have got."""

    def __init__(self, status: int, error: ErrorBody) -> None:
        super().__init__(error.message, param=error.param)
        self.status, self.type = status, error.type


class Offline:
    """A node that is ready. Any number of calls may run at once."""

    def __init__(self, node: Node, serving: Serving) -> None:
        self._node = node
        self.serving = serving

    async def answer(self, chat: bool, body: bytes) -> bytes:
        """The whole body of an answer that is not streamed. Raises KvrelayError; if it broke,
        AnswerBroke.
        """
        _, frames = await self.run(chat, body)
        return frames[-1].payload

    async def run(self, chat: bool, body: bytes) -> tuple[list[NodeRequest], list[Frame]]:
        """The legs of a completion that have run to their end, one for each prompt, and all their
        frames.

        Raises KvrelayError, AnswerBroke.
        """
        call = Call(chat, body, uuid.uuid4().hex)
        legs, _ = await legs_of(self.serving, self._node.sandbox, call)
        told: list[Frame] = []
        async with contextlib.aclosing(await frames_of(self._node, legs, call)) as frames:
            async for frame in frames:
                _raise_error(frame)
                told.append(frame)
        return legs, told


@asynccontextmanager
async def offline(config: NodeConfig) -> AsyncIterator[Offline]:
    """Start an engine for the length of the block. Raises ConfigError, EngineDead."""
    config = replace(config, kv_events_config=None)
    # Nobody is there to try again later: all that is asked at once is done in turn.
    node = Node(
        config, EngineClient(config), int(time.time()), sandbox=Sandbox(turn_deadline_s=None)
    )
    await node.engine.start()
    try:
        node.serving = await serving_of(config, node.engine, node.sandbox)
        yield Offline(node, node.serving)
    finally:
        await node.sandbox.close()
        await node.engine.stop()


def _raise_error(frame: Frame) -> None:
    if frame.kind is FrameKind.ERROR and frame.error is not None:
        raise AnswerBroke(frame.status, frame.error)
