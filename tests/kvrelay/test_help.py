"""`--help` at 80 columns: settings in groups, the common ones alone; `--help-all` has them all."""

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
    return said


@pytest.mark.parametrize("name", ["up", "router", "bench"])
def test_each_option_is_named_whole_and_the_common_ones_alone_at_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [param for param in ROOT.commands[name].params if param.param_type_name == "option"]
    common = [param for param in options if not param.rich_help_panel or param.name in COMMON]
    short, full = shown(capsys, name, "--help"), shown(capsys, name, "--help-all")
    for param, said in itertools.product(options, (short, full)):
        found = any(f"  {flag} " in said or f"  {flag}\n" in said for flag in param.opts)
        assert found == (said is full or param in common), (param.name, said)
    assert all(f"\n{param.rich_help_panel or 'Options'}:\n" in full for param in options)
    assert f"{len(options) - len(common)} more settings: kvrelay {name} --help-all" in short


def test_every_command_is_in_one_group_and_every_common_setting_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sorted(itertools.chain(*GROUPS.values())) == sorted(ROOT.commands)
    assert SETTINGS >= COMMON
    said = shown(capsys, "--help")
    for group, names in GROUPS.items():
        section = said.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert all(f"  {name} " in section for name in names)
