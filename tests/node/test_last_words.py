"""How the end of a process is told."""

from __future__ import annotations

import pytest

from kvrelay.node.process import describe_exit


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "killed, probably out of memory"),
        (-11, "SIGSEGV"),
        (0, "exit code 0"),
        (2, "exit code 2"),
    ],
)
def test_how_a_process_ended_is_told_in_words(code: int, said: str) -> None:
    assert describe_exit(code) == said
