"""`--help` at 80 columns: option names whole, in groups, of settings the common ones; `--help-all`
has them all.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import typer

from kvrelay import cli
from kvrelay.help import COMMON, GROUPS

ROOT: Any = typer.main.get_command(cli.app)
SETTINGS = {
    param.name
    for command in ROOT.commands.values()
    for param in command.params
    if param.rich_help_panel
}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(words) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    return said


def written(param: Any) -> str:
    """All its spellings, short ones first, those that switch off last."""
    ordered = (
        sorted(each, key=lambda word: word.startswith("--"))
        for each in (param.opts, param.secondary_opts)
    )
    return " / ".join(", ".join(each) for each in ordered if each)


@pytest.mark.parametrize("name", ROOT.commands)
def test_each_option_is_named_whole_and_the_common_ones_alone_at_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [param for param in ROOT.commands[name].params if param.param_type_name == "option"]
    common = [param for param in options if not param.rich_help_panel or param.name in COMMON]
    short = shown(capsys, name, "--help")
    full = shown(capsys, name, "--help-all")
    lines = {said: {line.strip() for line in said.splitlines()} for said in (short, full)}
    for param, said in itertools.product(options, (short, full)):
        found = any(f"{line} ".startswith(f"{written(param)} ") for line in lines[said])
        assert found == (said is full or param in common), (param.name, said)
    for panel in {param.rich_help_panel for param in options if param.rich_help_panel}:
        assert f"\n{panel}:\n" in full
    left = len(options) - len(common)
    assert (f"{left} more settings: kvrelay {name} --help-all" in short) == bool(left)


def test_common_settings_come_first_in_their_group(capsys: pytest.CaptureFixture[str]) -> None:
    full = shown(capsys, "up", "--help-all")
    assert (
        full.index("--gpu-memory-utilization")
        < full.index("--revision")
        < full.index("Transfer settings")
    )


def test_every_command_is_in_one_group_and_every_common_setting_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sorted(itertools.chain(*GROUPS.values())) == sorted(ROOT.commands)
    assert SETTINGS >= COMMON
    said = shown(capsys, "--help")
    for group, names in GROUPS.items():
        section = said.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert all(f"  {name} " in section for name in names)
