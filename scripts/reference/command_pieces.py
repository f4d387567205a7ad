"""The command line: what each command is for, and what it takes."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.reference.command_line import Command, Parameter, commands
from scripts.reference.markdown import code, table

__all__ = ["command_pieces"]

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
