"""No wait with a deadline on a queue.SimpleQueue, whose deadline may be forgotten.

CPython 3.10 to 3.12: get() of an empty queue that nobody waits on takes its lock, counts the time
that is left, and waits again for so long; if that has become negative meanwhile (the thread was not
running: a busy machine, SIGSTOP), for ever. A data plane's thread slept so until its next job, with
a READ in flight.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_imports import MAY_IMPORT


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_simple_queue_is_waited_for_with_a_deadline(package: str, repository: Path) -> None:
    wrong = [
        f"{file.relative_to(repository)}:{call.lineno}"
        for file in sorted((repository / package).rglob("*.py"))
        if "SimpleQueue" in (text := file.read_text(encoding="utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "get"
        if any(keyword.arg == "timeout" for keyword in call.keywords)
    ]
    assert not wrong, "\n".join(wrong)
