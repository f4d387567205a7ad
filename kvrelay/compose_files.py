"""`kvrelay compose`: writes compose.yaml, .env and the files of Prometheus and Grafana into a
folder.

Owns where they lie and what is never overwritten: a compose file that somebody wrote, and what
stands in a .env file. What is in them is compose.py's and deploy/monitoring's.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from rich.console import Console

from kvrelay.compose import ComposeConfig, compose_of, environment_of, host_paths
from kvrelay.settings import build
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

__all__ = ["absolute", "write"]

_MARK = "# Written by `kvrelay compose`"
_MONITORING = Path(__file__).parent / "monitoring"


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def absolute(values: Mapping[str, object]) -> dict[str, object]:
    """The settings with absolute paths, under which containers see the files too. A model on the
    Hub stays a name.
    """
    found = dict(values)
    model = str(values.get("model", ""))
    if model.startswith((".", "~", "/")) or (model and Path(model).exists()):
        found["model"] = _path(model)
    for name in ("chat_template", "generation_config"):
        if values.get(name, "auto") not in ("", "auto", "vllm"):
            found[name] = _path(str(values[name]))
    named = cast(tuple[str, ...], values.get("lora_modules", ()))
    adapters = EngineConfig("", enable_lora=True, lora_modules=named).adapters
    paths = tuple(f"{name}={_path(path)}" for name, path in adapters)
    return found | {"model": found.get("model", ""), "lora_modules": paths}


def _path(text: str) -> str:
    return str(Path(text).expanduser().absolute())


def write(values: Mapping[str, object], console: Console) -> int:
    """Write all files into the folder `output` of the values, and say what to type next.

    Raises ConfigError if a setting is wrong, what is to be mounted is not there, or a file is not
    ours or cannot be written.
    """
    folder = Path(str(values["output"]))
    config = build(
        ComposeConfig, absolute({name: value for name, value in values.items() if name != "output"})
    )
    for path in host_paths(config):
        if not Path(path).exists():
            raise ConfigError(
                f"{path} is not there, and containers would see an empty folder in its place; "
                f"name what is"
            )
    target, environment = folder / "compose.yaml", folder / ".env"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.read_text(encoding="utf-8").startswith(_MARK):
            raise ConfigError(
                f"{target} was not written by `kvrelay compose`; remove it or take another --output"
            )
        # Secrets stay: nodes that run have them.
        given = _read(environment) if environment.exists() else {}
        cores = len(os.sched_getaffinity(0))
        text = yaml.dump(compose_of(config, cores), Dumper=_Plain, sort_keys=False, width=120)
        written = environment_of(config, lambda: secrets.token_urlsafe(32), given)
        lines = "".join(f"{name}={value}\n" for name, value in written.items())
        # Nobody else may read it, and never half of it.
        half = folder / ".env.new"
        half.touch(mode=0o600)
        half.write_text(
            f"# For compose.yaml: secrets and what is this host's own.\n{lines}", encoding="utf-8"
        )
        half.replace(environment)
        for part in ("prometheus", "grafana"):  # the rest is for Kubernetes
            shutil.copytree(_MONITORING / part, folder / "monitoring" / part, dirs_exist_ok=True)
        target.write_text(
            f"{_MARK}, for a host with {cores} cores; run it again for another size.\n{text}",
            "utf-8",
        )
    except OSError as why:
        raise ConfigError(f"cannot write the compose files to {folder}: {why.strerror}") from why
    images = f"{written['KVRELAY_ROUTER_IMAGE']} and {written['KVRELAY_NODE_IMAGE']}"
    console.print(
        f"{target}: {config.cluster.prefill} prefill, {config.cluster.decode} decode and a router\n"
        f"images:    {images}, which deploy/compose builds\n"
        f"start it:  docker compose --project-directory {folder} up --wait"
    )
    return 0


def _read(file: Path) -> dict[str, str]:
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}
