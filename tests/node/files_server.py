"""A server with 64 files: `python files_server.py PORT`.."""

from __future__ import annotations

import logging
import resource
import sys
from typing import Any

import uvicorn

from kvrelay.openai_api.connections import connection_class


async def app(scope: Any, receive: Any, send: Any) -> None:
    with open("/dev/null", "rb"):
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    logging.basicConfig(level=logging.WARNING)
    http = connection_class(10_000)
    config = uvicorn.Config(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        lifespan="off",
        log_config=None,
        http=http,
        access_log=False,
    )
    uvicorn.Server(config).run()
