"""A process does not wait for who takes its log, and says what it has left out."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from kvrelay.node.process import MAX_QUEUED_LINES, LogThread

LINES = MAX_QUEUED_LINES + 5000
TALKATIVE = f"""
import logging, os, sys
from kvrelay.node.process import log_to_stderr
log_to_stderr("node")
for at in range({LINES}):
    logging.info("line %d", at)
os.write(1, b"here")
sys.stdin.read(1)
logging.info("the last one")
"""


def test_a_process_goes_on_while_nobody_reads_its_log_and_tells_what_it_has_left_out() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", TALKATIVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"here"  # a pipe takes 64 KiB and this was 500
        _, told = child.communicate(b"x", timeout=60)
    finally:
        child.kill()
        child.wait(10)
    lines = told.decode().splitlines()
    said = [line for line in lines if " line " in line]
    left_out = [int(line.split()[0]) for line in lines if "are left out" in line]
    assert len(said) + sum(left_out) in (LINES, LINES + 1)  # the last one may be among them
    assert "line 0" in said[0]
    assert sum(left_out) > 0


def test_the_end_of_a_process_does_not_wait_long_for_its_log() -> None:
    talks = TALKATIVE.replace(
        "sys.stdin.read(1)", "from kvrelay.node.process import exit_now; exit_now(3)"
    )
    ours, theirs = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", talks], stderr=theirs, cwd=Path(__file__).parents[2]
        )
        assert child.wait(60) == 3
    finally:
        os.close(ours)
        os.close(theirs)


def test_what_was_logged_is_written_when_it_is_flushed() -> None:
    ours, theirs = os.pipe()
    handler = LogThread(theirs)
    for text in ("one", "two"):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))
        handler.flush()
        assert os.read(ours, 100) == f"{text}\n".encode()
