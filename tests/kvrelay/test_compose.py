"""Compose files: pure over settings, equal to the one in deploy/compose, and written so that
nothing is lost.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvrelay.cluster_plan import ClusterConfig
from kvrelay.compose import ComposeConfig, compose_of, environment_of, write
from kvrelay.settings import build
from kvrelay.wire.errors import ConfigError

QUIET = Console(quiet=True)


def services(
    gpus: str = "", name: str = "kvrelay", model: str = "", **cluster: Any
) -> dict[str, Any]:
    config = ComposeConfig(
        build(ClusterConfig, {"model": model, **cluster}), (gpus,) if gpus else (), name
    )
    found: dict[str, Any] = compose_of(config, 0)["services"]
    return found


def interpolated(text: str, values: dict[str, str]) -> str:
    return re.sub(
        r"\$\{(\w+)(?::([-?])([^}]*))?\}",
        lambda m: values.get(m[1]) or (m[3] if m[2] == "-" else ""),
        text,
    )


def nodes(all_services: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each for name, each in all_services.items() if name.startswith(("prefill", "decode"))
    }


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 8))
def test_every_node_is_there_once_and_the_router_knows_all(
    prefill: int, decode: int, gpus: int
) -> None:
    made = services(gpus=",".join(map(str, range(gpus))), prefill=prefill, decode=decode)
    names = [f"prefill-{index}" for index in range(prefill)] + [
        f"decode-{index}" for index in range(decode)
    ]
    assert list(nodes(made)) == names
    told = [
        flag.partition("=")[2]
        for flag in made["router"]["command"]
        if flag.startswith(("--prefill", "--decode"))
    ]
    assert told == [f"http://{name}:8000" for name in names]
    for name, node in nodes(made).items():
        assert f"--kv-host=kv-{name}" in node["command"]
        assert node["pid"] == node["ipc"] == "container:kvrelay-namespaces"
        assert ("deploy" in node) == (gpus > 0)


def test_a_node_sees_its_own_gpu_and_direct_reads_those_of_the_others() -> None:
    made = nodes(services(gpus="7,4", prefill=2, decode=1))
    own = [node["environment"]["CUDA_VISIBLE_DEVICES"] for node in made.values()]
    assert own == ["0", "1", "0"], "indices count what is in the container"
    for node in made.values():
        (request,) = node["deploy"]["resources"]["reservations"]["devices"]
        assert request["device_ids"] == ["4", "7"]


def test_only_the_direct_connector_has_containers_share_namespaces() -> None:
    made = services(kv_connector="nixl")
    assert "namespaces" not in made
    assert not {"pid", "ipc"} & set(made["decode-0"])
    assert made["decode-0"]["shm_size"] == "8gb"
    assert services(kv_connector="direct")["decode-0"]["pid"] == "container:kvrelay-namespaces"


def test_no_secret_is_in_the_file_and_dollars_are_kept() -> None:
    made = compose_of(
        ComposeConfig(build(ClusterConfig, {"model": "org/a$b", "served_model_name": "$HOME"}))
    )
    text = yaml.safe_dump(made)
    assert "--model=org/a$$b" in made["services"]["prefill-0"]["command"]
    assert "--served-model-name=$$HOME" in text
    assert "cluster-secret" not in text
    assert "${KVRELAY_CLUSTER_SECRET:?set it in .env}" in text


def test_files_of_the_host_are_mounted_where_they_are() -> None:
    made = services(
        model="/models/llama",
        enable_lora=True,
        lora_modules=("sql=/adapters/sql",),
        chat_template="/t.jinja",
    )
    mounts = [
        "/models/llama:/models/llama:ro",
        "/t.jinja:/t.jinja:ro",
        "/adapters/sql:/adapters/sql:ro",
    ]
    assert made["decode-0"]["volumes"] == ["cache:/var/cache/kvrelay", *mounts]
    with pytest.raises(ConfigError, match="mounted into containers: name it by an absolute path"):
        services(model="./llama")


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("0,0", "gpus names one twice: 0,0"),
        ("all", "gpus must be indices"),
        ("0,GPU-a", "gpus must be all indices or all UUIDs, got 0,GPU-a"),
    ],
)
def test_wrong_gpus_are_refused(gpus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        services(gpus=gpus)
    with pytest.raises(ConfigError, match="device cuda needs --gpus"):
        services(device="cuda")
    with pytest.raises(ConfigError, match="device cpu and gpus contradict each other"):
        services(gpus="0", device="cpu")
    with pytest.raises(ConfigError, match="name must be lower-case letters"):
        services(name="My cluster")


def test_the_demo_in_deploy_is_what_this_command_writes(repository: Path) -> None:
    folder = repository / "deploy" / "compose"
    lines = (folder / ".env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    whole = yaml.safe_load(interpolated((folder / "compose.yaml").read_text(), env))
    demo = whole["services"]
    for profile, gpus in (("cpu", ""), ("gpu", "0,1")):
        config = ComposeConfig(build(ClusterConfig, {"model": ""}), (gpus,) if gpus else ())
        text = yaml.safe_dump(compose_of(config)).replace("./monitoring", "../monitoring")
        written = yaml.safe_load(interpolated(text, env | environment_of(config, str, env)))
        made = written["services"]
        assert written["networks"] == whole["networks"]
        for name, service in made.items():
            theirs = dict(demo[f"{name}-gpu" if gpus and name in nodes(made) else name])
            if name in nodes(made):
                assert theirs.pop("profiles") == [profile]
                theirs["command"] = [word for word in theirs["command"] if word != "--model="]
                theirs["networks"]["default"] = {
                    "aliases": theirs["networks"]["default"]["aliases"][:1]
                }
            theirs.pop("build", None)
            for each in (theirs, service):  # the order of flags says nothing
                each["command"] = sorted(each.get("command", ()))
            assert theirs == service, name


def test_written_files_keep_secrets_and_what_others_wrote(tmp_path: Path) -> None:
    values: dict[str, object] = {"output": str(tmp_path), "prefill": 2}
    assert write(values, QUIET) == 0
    first = (tmp_path / ".env").read_text()
    drawn = "KVRELAY_ADMIN_KEY|KVRELAY_NODE_API_KEY|KVRELAY_CLUSTER_SECRET|GRAFANA_PASSWORD"
    secrets = re.findall(rf"^(?:{drawn})=(.+)$", first, re.M)
    assert len(set(secrets)) == 4
    assert min(map(len, secrets)) > 40
    assert stat.S_IMODE(os.stat(tmp_path / ".env").st_mode) == 0o600
    (tmp_path / ".env").write_text(
        first.replace("KVRELAY_API_KEY=", "KVRELAY_API_KEY=mine") + "MY_OWN=1\n"
    )
    assert write(values | {"prefill": 1, "decode": 3}, QUIET) == 0
    second = (tmp_path / ".env").read_text()
    assert all(secret in second for secret in secrets)
    assert "KVRELAY_API_KEY=mine" in second
    assert "MY_OWN=1" in second
    assert "decode-2" in yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    assert (tmp_path / "monitoring" / "prometheus" / "prometheus.yml").exists()
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    with pytest.raises(ConfigError, match="was not written by `kvrelay compose`"):
        write(values, QUIET)


def test_images_are_those_of_the_size_and_release_that_is_asked_for_but_for_others_own(
    tmp_path: Path,
) -> None:
    env, values = tmp_path / ".env", {"output": str(tmp_path)}

    def image_of_nodes(**more: object) -> str:
        assert write(values | more, QUIET) == 0
        (image,) = re.findall("^KVRELAY_NODE_IMAGE=(.*)$", env.read_text(), re.M)
        return str(image)

    assert image_of_nodes() == "kvrelay/node-cpu:0.1.0"
    assert image_of_nodes(gpus=("0,1",)) == "kvrelay/node-cuda:0.1.0"
    env.write_text(env.read_text().replace("node-cuda:0.1.0", "node-cuda:0.0.9"))
    assert image_of_nodes(gpus=("0,1",)) == "kvrelay/node-cuda:0.1.0"
    env.write_text(
        env.read_text().replace("kvrelay/node-cuda:0.1.0", "mirror.example/kvrelay/node-cuda:mine")
    )
    assert image_of_nodes() == "mirror.example/kvrelay/node-cuda:mine"


def test_paths_are_made_absolute_and_names_on_the_hub_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()

    def written(**values: object) -> dict[str, Any]:
        write({"output": "here", **values}, QUIET)
        text = (tmp_path / "here" / "compose.yaml").read_text()
        node: dict[str, Any] = yaml.safe_load(text)["services"]["decode-0"]
        return node

    given = {"model": "llama", "enable_lora": True, "lora_modules": ("a=./x",)}
    with pytest.raises(ConfigError, match=f"{tmp_path}/x is not there"):
        written(**given)
    (tmp_path / "x").mkdir()
    paths = {f"--model={tmp_path}/llama", f"--lora-modules=a={tmp_path}/x"}
    assert paths <= set(written(**given)["command"])
    made = written(model="org/name")
    assert "--model=org/name" in made["command"]
    assert made["volumes"] == ["cache:/var/cache/kvrelay"]
