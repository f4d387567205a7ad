"""The node's life: start the engine process and the HTTP server, serve, drain, end. `run` is the entry point."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

import uvicorn
from fastapi import FastAPI

from node.app import Node, create_app
from node.engine_client import EngineClient
from node.kv_events import KvEvents
from node.loading import serving_of
from node.metrics import NodeMetrics
from wire.config import NodeConfig
from wire.errors import KvrelayError

__all__ = ["run"]

log = logging.getLogger("kvrelay.node")

DRAIN_DEADLINE_S = 30


def run(config: NodeConfig) -> int:
    """Serve until SIGTERM or SIGINT. Exit code 0 after an orderly end, 1 when the engine failed."""
    node = Node(config, EngineClient(config), created=int(time.time()))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(node, lambda app: _lifespan(app, node, lambda: setattr(server, "should_exit", True))),
            host=config.host,
            port=config.port,
            loop="uvloop",
            http="httptools",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=DRAIN_DEADLINE_S,
        )
    )
    server.run()
    return 1 if node.failure is not None else 0


@contextlib.asynccontextmanager
async def _lifespan(_: FastAPI, node: Node, give_up: Callable[[], None]) -> AsyncIterator[None]:
    """The server listens while the model loads; /health tells the two apart."""
    await node.engine.start()
    loading = asyncio.create_task(_load(node, give_up))
    try:
        yield
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        if node.kv_events is not None:
            await node.kv_events.close()
        await node.engine.stop()


async def _load(node: Node, give_up: Callable[[], None]) -> None:
    """Make the node ready, then watch the engine. A node without one ends, so that its supervisor starts another."""
    config = node.config
    try:
        serving = await serving_of(config, node.engine)
        if config.kv_events and config.engine.prefix_cache:
            node.kv_events = KvEvents(config, serving.info, serving.model_name)
            node.engine.on_changes = node.kv_events.tell
    except Exception as why:
        node.failure = why.message if isinstance(why, KvrelayError) else f"{type(why).__name__}: {why}"
        log.error("the node cannot serve: %s", node.failure, exc_info=not isinstance(why, KvrelayError))
        give_up()
        return
    name, info = serving.model_name, serving.info
    node.metrics = NodeMetrics(
        lambda: node.engine.stats, model_name=name, role=config.role, max_loras=config.engine.adapter_slots
    )
    node.serving = serving
    log.info(
        "%s node serves %s on http://%s:%d: %d blocks of %d tokens (%d tokens, %.0f MiB), context %d, loaded in %.1f s",
        config.role,
        name,
        config.host,
        config.port,
        info.num_blocks,
        info.block_tokens,
        info.num_blocks * info.block_tokens,
        info.num_blocks * info.block_tokens * info.kv_bytes_per_token / 2**20,
        info.max_model_len,
        info.load_s,
    )
    await node.engine.ended.wait()
    node.failure = node.engine.failure
    log.error("%s", node.failure)
    give_up()
