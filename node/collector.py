"""Python's garbage collector in an engine or rank process: it never looks at what was imported.

Owns the command line that starts such a process. To import torch makes half a million objects that
stay; to look for garbage among them took 0.3 s of the start, and as long as they are not frozen
each full collection does it again, in the middle of a step.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["command_of", "imports_are_done"]


def command_of(module: str, *flags: str) -> list[str]:
    """The command that runs `main` of this module, which calls `imports_are_done`. `flags`: of the
    interpreter.
    """
    code = f"import gc; gc.disable(); from {module} import main; main()"
    # With -P nothing comes from the working directory.
    return [sys.executable, "-P", *flags, "-c", code]


def imports_are_done() -> None:
    """What is there now stays; collect from here on."""
    gc.freeze()
    gc.enable()
