"""`kvrelay config`: each setting of a command that serves, its value, and where that comes from.

Owns the lines that are printed, which are a config file again. Where values come from and who wins
is settings.py's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from kvrelay.settings import Setting

__all__ = ["lines_of"]

_HIDDEN = "(not shown)"
_COMMENT_AT = 40


def lines_of(
    known: Mapping[str, Setting], values: Mapping[str, object], sources: Mapping[str, str]
) -> Iterator[str]:
    """YAML with the source of each value behind it. What has no value in `values` is at its
    default.
    """
    group = ""
    for name, setting in known.items():
        if setting.group != group:
            group = setting.group
            yield f"\n# {group} settings"
        value = values.get(name, setting.default)
        text = json.dumps(_HIDDEN) if setting.secret and value else _written(value)
        unset = "# " if value is None else ""  # a file cannot say that there is no value
        yield f"{f'{unset}{name}: {text}':{_COMMENT_AT}}  # {sources.get(name, 'default')}"


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(value, ensure_ascii=False)
