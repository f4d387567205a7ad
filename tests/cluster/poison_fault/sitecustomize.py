"""Python itself loads this in each process that has the folder in its PYTHONPATH: nodes that die of
marked requests.

While the file named by POISON_FAULT exists, a request with `kill-http` in its body kills the HTTP
process of each node that reads it, and one with `kill-engine` its engine process. A router refuses
what nodes have died of for the seconds that POISON_REFUSED_S says.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if "router" in sys.orig_argv:
    from kvrelay.router.request import failures

    failures.REFUSED_S = float(os.environ["POISON_REFUSED_S"])
elif {"prefill", "decode"} & set(sys.orig_argv):
    from typing import Any

    from kvrelay.node.engine_client import EngineClient
    from kvrelay.node.serving import Serving

    trigger = Path(os.environ["POISON_FAULT"])
    make_requests, start = Serving.requests, EngineClient.start
    engines: list[EngineClient] = []

    async def started(engine: EngineClient) -> None:
        await start(engine)
        engines.append(engine)

    def killed(serving: Serving, call: Any, *rest: Any) -> Any:
        if trigger.exists():
            if b"kill-http" in call.body:
                os.kill(os.getpid(), signal.SIGKILL)
            if b"kill-engine" in call.body:
                os.kill(engines[0].pid(), signal.SIGKILL)
        return make_requests(serving, call, *rest)

    EngineClient.start = started  # type: ignore[method-assign]
    Serving.requests = killed  # type: ignore[method-assign]
