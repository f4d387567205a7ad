"""`python -m tests.soak.chaos`: every kind of fault once on a small cluster, with the seed that is
written here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.chaos.faults import KINDS, NETWORK

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

SEED = 834  # KV is full first, and the router is lost late: before that there are answers
SMALL = "--prefill 1 --decode 2 --streams 5 --per-kind 1 --longest 1000 --pool-mib 4"


def test_every_kind_of_fault_once_breaks_no_promise(repository: Path) -> None:
    options = f"{SMALL} --each-once --every-s 1 --seed {SEED}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.chaos", *options.split()],
        env={**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout, done.stderr[-1500:]
    told = json.loads(done.stdout)
    assert told["broken"] == []
    assert told["ends"]["done"] > 50
    assert told["preemptions"] > 0
    assert told["failed_over"] > 0
    # Networks and clocks where this machine can.
    assert set(KINDS) - {*NETWORK, "clock jump"} <= set(told["faults"]) <= set(KINDS)
