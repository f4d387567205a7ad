"""What the tests of docs/ share: pages, the blocks of code in them, and the commands in those."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"(?:^<!-- (?P<kind>run|settings): (?P<name>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code. `kind` and `name` are of the comment before it, which readers do not see."""

    page: Path
    language: str
    text: str
    kind: str
    name: str


def pages() -> list[Path]:
    """All pages, the README among them."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of code of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, found["language"], found["text"], found["kind"] or "", found["name"] or "")
        for found in _FENCE.finditer(text)
    ]


def words(page: Path) -> list[str]:
    """What is set as code in a page's sentences and tables."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return _INLINE.findall(text)


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block for the shell, as words, without what stands for a reader's own
    values.
    """
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.count("'") % 2 == 0 and line.count('"') % 2 == 0:
            found: list[str] = []
            for word in shlex.split(line, comments=True):
                if word in ("|", "&&", ";"):
                    yield found
                    found = []
                else:
                    found.append(word)
            yield found
