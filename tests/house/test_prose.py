"""Docstrings and pages keep the rules of CONTRIBUTING.md that a machine can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = [
    "wire",
    "paged_engine",
    "kv_transfer",
    "cache_node",
    "openai_api",
    "prefill_node",
    "decode_node",
    "node",
    "planner",
    "router",
    "kvrelay",
    "scripts",
]
MOST_WORDS = 20
_BANNED = "Of It Its Those Who What So As Whether That There Whose See"
UNCLEAR = frozenset(_BANNED.split())
NO_IMPERATIVE = {"A", "An", "The", "Returns", "Raises", "Yields", "Whether", "All", "How", "Which"}
Named = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(tree: ast.AST) -> Iterator[Named]:
    """Yield the module, and what is public in it or in its public classes."""
    if isinstance(tree, ast.Module):
        yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Named) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def faults(node: Named, text: str) -> Iterator[str]:
    """Yield what is wrong with a docstring."""
    sentence = re.split(r"(?<=[.:?])\s", " ".join(text.split()))[0]
    first = sentence.split()[0].strip("`.,:")
    if len(sentence.split()) > MOST_WORDS:
        yield f"more than {MOST_WORDS} words: {sentence}"
    if first in UNCLEAR:
        yield f"begins with {first}: {sentence}"
    if isinstance(node, ast.ClassDef) and first not in {"A", "An"}:
        yield f"a class is 'A ...': {sentence}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and first in NO_IMPERATIVE:
        yield f"not an imperative: {sentence}"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_plainly(package: str, repository: Path) -> None:
    wrong = [
        f"{file.relative_to(repository)}:{getattr(node, 'lineno', 1)} {fault}"
        for file in sorted((repository / package).rglob("*.py"))
        for node in public(ast.parse(file.read_text(encoding="utf-8")))
        if (text := ast.get_docstring(node))
        for fault in faults(node, text)
    ]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)
