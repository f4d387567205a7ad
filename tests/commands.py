"""Commands that tests run to their end.

Owns their deadline; refuses to take one that fails.
"""

from __future__ import annotations

import subprocess
from typing import Any

__all__ = ["output_of"]

_DEADLINE_S = 600.0


def output_of(*command: object, **more: Any) -> str:
    """Return what a command prints, which must end with 0; `more` is for subprocess.run."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_DEADLINE_S, **more)
    assert done.returncode == 0, done.stdout[-60_000:] + done.stderr
    return done.stdout
