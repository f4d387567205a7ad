"""The terminal of the program's commands."""

from __future__ import annotations

from typing import Any

from rich.console import Console

__all__ = ["plain_console"]


def plain_console(**more: Any) -> Console:
    """Return a console that colours no numbers and breaks no lines."""
    return Console(highlight=False, soft_wrap=True, **more)
