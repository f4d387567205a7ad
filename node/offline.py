"""A node without HTTP, in the caller's process: for the class LLM."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrelay.node.completions import run_requests
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Node
from kvrelay.node.preprocess import prepare
from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Call, Serving, load_serving
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.frames import Frame, FrameKind

__all__ = ["Offline", "offline"]


@dataclass(frozen=True, slots=True)
class Offline:
    """A ready node without HTTP. Any number of calls may run at once."""

    _node: Node
    serving: Serving

    async def run(self, chat: bool, body: bytes) -> tuple[list[NodeRequest], list[Frame]]:
        """Run a completion; return a request for each prompt, and all frames.

        Raises KvrelayError.
        """
        call = Call(chat, body, uuid.uuid4().hex)
        requests, _ = await prepare(self.serving, self._node.sandbox, call)
        found: list[Frame] = []
        async with contextlib.aclosing(await run_requests(self._node, requests, call)) as frames:
            async for frame in frames:
                if frame.kind is FrameKind.ERROR and frame.error is not None:
                    raise KvrelayError(frame.error.message, param=frame.error.param)
                found.append(frame)
        return requests, found


@asynccontextmanager
async def offline(config: NodeConfig) -> AsyncIterator[Offline]:
    """Start an engine. Raises ConfigError, EngineDead."""
    # Nobody tries again later: all is done in turn.
    sandbox = Sandbox(start_deadline_s=None)
    node = Node(config, EngineClient(config), int(time.time()), sandbox=sandbox)
    await node.engine.start()
    try:
        node.serving = await load_serving(config, node.engine, node.sandbox)
        yield Offline(node, node.serving)
    finally:
        await node.sandbox.close()
        await node.engine.stop()
