"""Where generated pieces stand in the pages of docs/, and the pages with the pieces as they must
be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.reference.command_line import command_pieces
from scripts.reference.error_pieces import error_pieces
from scripts.reference.http_pieces import http_pieces
from scripts.reference.metric_families import metric_pieces
from scripts.reference.setting_pieces import setting_pieces

__all__ = ["current", "pieces"]

_PLACE = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SOURCES: tuple[Callable[[], Mapping[str, str]], ...] = (
    setting_pieces,
    command_pieces,
    http_pieces,
    metric_pieces,
    error_pieces,
)


def pieces() -> dict[str, str]:
    return {name: text for source in _SOURCES for name, text in source().items()}


def current(docs: Path) -> dict[Path, str]:
    """Return the text that each page with places for pieces must have.

    Raises KeyError at a place for an unknown piece, ValueError if a piece has no place or several.
    """
    known, used, pages = pieces(), [], {}
    for page in sorted(docs.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        used += [name for _, name, _ in _PLACE.findall(text)]
        filled = _PLACE.sub(
            lambda found: f"{found[1]}\n{known[found[2]].strip()}\n\n{found[3]}", text
        )
        if _PLACE.search(text):
            pages[page] = filled
    wrong = sorted(name for name in known if used.count(name) != 1)
    if wrong:
        raise ValueError(
            f"each piece needs one place in docs/; these have none or several: {', '.join(wrong)}"
        )
    return pages
