"""The commands of `kvrelay` and their parameters, read from the typer application, and their page.

typer has its own copy of click since 0.29, so nothing here names click's types.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import typer

from kvrelay.cli import app
from scripts.reference.markdown import code, table

__all__ = ["Command", "Parameter", "command_pieces", "commands", "general_flags"]

_KINDS: dict[Any, str] = {int: "INT", float: "NUMBER"}
_SECTIONS = {
    "Engine settings": "engine",
    "Transfer settings": "hand-over",
    "Cache settings": "kv-below-the-pool",
    "Node settings": "node",
    "Ranks settings": "ranks-on-other-hosts",
    "Cluster settings": "cluster",
    "Router settings": "router",
    "Bench settings": "measuring",
}
"""Groups of settings in --help, and their headings in configuration.md."""


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
    return tuple(_read_command(each) for each in root.commands.values() if not each.hidden)


def general_flags() -> set[str]:
    """Return the flags of `kvrelay` itself, and those that every command has."""
    root: Any = typer.main.get_command(app)
    return {flag for each in root.params for flag in (*each.opts, *each.secondary_opts)} | {
        "--help",
        "--help-all",
        "-h",
    }


def _read_command(found: Any) -> Command:
    shown = tuple(_parameter(each) for each in found.params if not getattr(each, "hidden", False))
    return Command(str(found.name), " ".join(str(found.help or "").split()), shown)


def _parameter(found: Any) -> Parameter:
    argument = found.param_type_name == "argument"
    flags = () if argument else tuple(sorted((*found.opts, *found.secondary_opts), key=_long_first))
    env = found.envvar if isinstance(found.envvar, str) else " or ".join(found.envvar or ())
    is_flag = bool(getattr(found, "is_flag", False))
    default = found.default or ""
    if argument or is_flag or found.show_default is False:
        default = ""
    kind = _KINDS.get(getattr(found.type_descriptor, "annotation", None), "TEXT")
    metavar = "" if is_flag else str(found.metavar or ("" if argument else kind))
    return Parameter(
        str(found.name),
        flags,
        metavar or (str(found.name).upper() if argument else ""),
        " ".join(str(getattr(found, "help", "") or "").split()),
        env,
        ", ".join(default) if isinstance(default, list) else str(default),
        bool(found.required),
        str(getattr(found, "rich_help_panel", "") or ""),
    )


def _long_first(flag: str) -> tuple[bool, bool]:
    return not flag.startswith("--"), flag.startswith("--no-")


def command_pieces() -> dict[str, str]:
    """Return the list of all commands, and all of them one by one."""
    found = commands()
    rows = [[f"[`kvrelay {each.name}`](#kvrelay-{each.name})", each.about] for each in found]
    told = [part for each in found for part in _command(each)]
    return {"command-list": table(["Command", "What it does"], rows), "commands": "\n".join(told)}


def _command(command: Command) -> Iterable[str]:
    name = f"kvrelay {command.name}"
    arguments = [each.metavar for each in command.parameters if not each.flags]
    options = ["[OPTIONS]"] if len(arguments) < len(command.parameters) else []
    yield f"## {name}\n\n{command.about}\n\n```text\n{' '.join([name, *arguments, *options])}\n```\n"
    own = [each for each in command.parameters if each.panel not in _SECTIONS]
    if own:
        yield table(["Option", "Variable", "Default", "Meaning"], map(_row, own))
    for panel, section in _SECTIONS.items():
        flags = [code(each.flags[0]) for each in command.parameters if each.panel == panel]
        if flags:
            yield f"[{panel}](configuration.md#{section}): {', '.join(flags)}.\n"


def _row(each: Parameter) -> list[str]:
    spelled = ", ".join(map(code, each.flags)) if each.flags else ""
    return [
        f"{spelled} {code(each.metavar)}".strip(),
        code(each.env),
        code(each.default),
        each.help,
    ]
