"""`kvrelay config`: what is in force for a command, and where each value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay import cli
from kvrelay.config_commands import EXPLAINED

KEYS = ("KVRELAY_API_KEY", "KVRELAY_NODE_API_KEY", "KVRELAY_ADMIN_KEY", "KVRELAY_CLUSTER_SECRET")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KEYS, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.delenv(name, raising=False)


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, str]]:
    """By setting, its value as it is written and where that comes from."""
    assert cli.run(["config", *words]) == 0
    lines = [
        line.rpartition("  # ") for line in capsys.readouterr().out.splitlines() if "  # " in line
    ]
    return {
        text.partition(":")[0]: (text.partition(":")[2].strip(), source)
        for text, _, source in lines
    }


def test_each_value_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        f"# ours\nport: 9000\n\nmax-queue: 50\nworkers: 2\nadmin_key: from the file\n"
        f"keys:\n  - name: a\n    sha256: '{'0' * 64}'\n"
    )
    monkeypatch.setenv("KVRELAY_API_KEY", "of the environment")
    words = (
        "router",
        "--config",
        str(file),
        "--port",
        "9001",
        "--strict-roles",
        "--prefill=http://a",
    )
    found = explained(capsys, *words)
    assert found["port"] == ("9001", "flag --port")
    assert found["max_queue"] == ("50", f"{file}:4")
    assert found["keys"][1] == f"{file}:7"
    assert '"name": "a"' in found["keys"][0]
    assert found["api_key"] == ('"(not shown)"', "KVRELAY_API_KEY")
    assert found["admin_key"] == ('"(not shown)"', f"{file}:6")
    assert found["node_api_key"] == ('""', "default")
    assert found["prefill"] == ('["http://a"]', "flag --prefill")
    assert found["strict_roles"] == ("true", "flag --strict-roles")
    assert found["host"] == ('"127.0.0.1"', "default")


@pytest.mark.parametrize(
    ("command", "drawn"),
    [
        ("up", {"cluster_secret", "admin_key", "node_api_key"}),
        ("router", {"admin_key"}),
        ("prefill", set()),
        ("decode", set()),
    ],
)
def test_every_setting_of_a_command_is_there_and_what_is_printed_is_a_config_file(
    command: str, drawn: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if command == "router" else ["--model=m"]
    found = explained(capsys, command, *model)
    settings = EXPLAINED[command][1]  # type: ignore[index]
    assert {name.removeprefix("# ") for name in found} == set(settings)
    at_start = {name for name, (_, source) in found.items() if source == "drawn at each start"}
    assert at_start == drawn
    cli.run(["config", command, *model])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    again = explained(capsys, command, "--config", str(tmp_path / "printed.yaml"))
    assert {name: value for name, (value, _) in again.items()} == {
        name: value for name, (value, _) in found.items()
    }


def test_cpu_is_a_flag_for_the_device_and_a_variable_may_be_a_switch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")
    found = explained(capsys, "serve", "m", "--cpu", "--enable-lora")
    assert found["device"] == ('"cpu"', "flag --cpu")
    assert found["allow_runtime_lora"] == ("true", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["upp"],
            "config explains up, serve, prefill, decode, router, rank, not 'upp'; did you mean up?",
        ),
        (["chat"], "config explains up"),
        (["up", "--prot", "3"], "No such option: --prot"),
        (["router", "--max-queue", "-1"], "max_queue must not be negative, got -1"),
        (
            ["decode", "--cpu", "--device", "cuda", "--model", "m"],
            "--cpu and --device cuda contradict each other",
        ),
        (["router", "--config", "none.yaml"], "cannot read config file none.yaml"),
    ],
)
def test_what_the_command_refuses_is_refused_here(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["config", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
