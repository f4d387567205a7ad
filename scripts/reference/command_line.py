"""The commands of `kvrelay` and their parameters, as plain values, read from the typer application.

typer has its own copy of click since 0.29, so nothing here names click's types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from kvrelay.cli import app

__all__ = ["Command", "Parameter", "commands", "general_flags"]

_KINDS: dict[Any, str] = {int: "INT", float: "NUMBER"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option or an argument of a command."""

    name: str
    """snake_case: the field of a config type, if it is a setting."""
    flags: tuple[str, ...]
    """All spellings, the long one first; none for an argument."""
    metavar: str
    help: str
    env: str
    """A variable that stands in for it, or nothing."""
    default: str
    required: bool
    panel: str
    """The title of its group in --help; settings have one each."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, `kvrelay NAME`."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]


def commands() -> tuple[Command, ...]:
    root: Any = typer.main.get_command(app)
    return tuple(_command(each) for each in root.commands.values() if not each.hidden)


def general_flags() -> set[str]:
    """Return the flags of `kvrelay` itself, and those that every command has."""
    root: Any = typer.main.get_command(app)
    return {flag for each in root.params for flag in (*each.opts, *each.secondary_opts)} | {
        "--help",
        "--help-all",
        "-h",
    }


def _command(found: Any) -> Command:
    shown = tuple(_parameter(each) for each in found.params if not getattr(each, "hidden", False))
    return Command(str(found.name), " ".join(str(found.help or "").split()), shown)


def _parameter(found: Any) -> Parameter:
    argument = found.param_type_name == "argument"
    flags = () if argument else tuple(sorted((*found.opts, *found.secondary_opts), key=_long_first))
    env = found.envvar if isinstance(found.envvar, str) else " or ".join(found.envvar or ())
    is_flag = bool(getattr(found, "is_flag", False))
    default = (
        "" if argument or is_flag or found.default in (None, "", (), []) else str(found.default)
    )
    kind = _KINDS.get(getattr(found.type_descriptor, "annotation", None), "TEXT")
    metavar = "" if is_flag else str(found.metavar or ("" if argument else kind))
    return Parameter(
        str(found.name),
        flags,
        metavar or (str(found.name).upper() if argument else ""),
        " ".join(str(getattr(found, "help", "") or "").split()),
        env,
        default,
        bool(found.required),
        str(getattr(found, "rich_help_panel", "") or ""),
    )


def _long_first(flag: str) -> tuple[bool, bool]:
    return not flag.startswith("--"), flag.startswith("--no-")
