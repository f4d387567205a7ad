"""Restart every node of a cluster, one after the other, under streams: none may be lost.

    python -m tests.soak.rolling --streams 50                 # 2P2D of the tiny model, here
    python -m tests.soak.rolling --streams 50 --from COMMIT   # an upgrade from that code

Runs tests.soak.chaos with restarts alone, and takes its options. A node is told to end by SIGTERM,
as Kubernetes and systemd do, drains, and is started again; the next one follows when the router
uses it and it has met its partners.
"""

from __future__ import annotations

import sys

from tests.soak.chaos.__main__ import main

_OPTIONS = "--rolling --prefill 2 --decode 2 --streams 50 --every-s 3 --pool-mib 128"
_SMALL = "--per-kind 4 --longest 1000"

if __name__ == "__main__":
    sys.exit(main([*_OPTIONS.split(), *_SMALL.split(), *sys.argv[1:]], __doc__))
