"""Pieces of Markdown: tables whose cells may hold anything. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["code", "table"]


def code(text: object) -> str:
    words = str(text)
    if not words:
        return ""
    return f"`` {words} ``" if "`" in words else f"`{words}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    filled = [list(row) for row in rows]
    keep = [at for at in range(len(head)) if any(row[at] for row in filled)]
    lines = [
        [head[at] for at in keep],
        ["---"] * len(keep),
        *([row[at] for at in keep] for row in filled),
    ]
    return "\n".join(map(_row, lines)) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
