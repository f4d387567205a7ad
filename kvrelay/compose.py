"""`kvrelay compose`: the compose file of a cluster in containers on one host, and the files beside
it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml
from rich.console import Console

from kvrelay.cluster_plan import (
    CLUSTER_SECRET,
    NOT_FLAGS,
    ClusterConfig,
    nodes_of,
)
from kvrelay.settings import Values, build, flags_of
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.config_checks import require
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.json_object import JsonObject

__all__ = [
    "NOT_FOR_COMPOSE",
    "ComposeConfig",
    "absolute",
    "compose_of",
    "environment_of",
    "host_paths",
    "write",
]

# Settings of `kvrelay up` that containers decide, that .env has because they are secret, or that
# name files, ports or peers outside the containers.
NOT_FOR_COMPOSE = (
    *("kv_host", "api_key", "admin_key", "node_api_key", "cluster_secret", "hf_token"),
    *("log_dir", "demo", "demo_exit", "start_deadline_s", "stop_deadline_s"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("node_ssl_certfile", "node_ssl_keyfile", "tool_parser_plugin"),
    *("heartbeat_port", "kubernetes_selector", "kubernetes_namespace"),
    *("otlp_traces_endpoint",),
)
_PORT = 8000
_OUR_IMAGE = re.compile(r"kvrelay/(node-cpu|node-cuda|router):\d+\.\d+\.\d+")
# The network of the nodes alone: the control channel and UCX, which has no authentication, listen
# on its interface.
_KV = "kv"
_NAME = r"[a-z0-9][a-z0-9_-]*"
_CACHE = (
    "/var/cache/kvrelay"  # the images' folder for what may be written (deploy/docker/Dockerfile)
)


@dataclass(frozen=True, slots=True)
class ComposeConfig:
    """A cluster in containers on one host."""

    cluster: ClusterConfig
    gpus: tuple[str, ...] = ()
    """GPUs for the nodes, by index or by UUID: 0,1,2,3, or given again. Without any the nodes
    compute on the CPU.
    """
    name: str = "kvrelay"
    """Name of the compose project: its containers, network and volumes begin with it."""
    output: str = "."
    """Folder of the files."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(_NAME, self.name) is not None,
            f"name must be lower-case letters, digits, - and _, beginning with a letter or digit, "
            f"got {self.name!r}",
        )
        ids = self.gpu_ids
        known = all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", gpu) for gpu in ids)
        require(
            known,
            f"gpus must be indices (0,1) or UUIDs (GPU-...), got {','.join(ids)}; `nvidia-smi -L` "
            f"lists them",
        )
        kinds = {gpu.isdigit() for gpu in ids}
        require(len(kinds) < 2, f"gpus must be all indices or all UUIDs, got {','.join(ids)}")
        require(
            len(set(ids)) == len(ids),
            f"gpus names one twice: {','.join(ids)}; nodes share GPUs if there are too few",
        )
        require(
            self.cluster.node.engine.device != "cuda" or bool(ids),
            "device cuda needs --gpus, for example --gpus 0,1, so that each node has its own",
        )
        require(
            not (ids and self.cluster.node.engine.device == "cpu"),
            "device cpu and gpus contradict each other",
        )
        for path in host_paths(self):
            require(
                PurePosixPath(path).is_absolute() and ":" not in path,
                f"{path!r} is mounted into containers: name it by an absolute path without a colon",
            )
        self.nodes(0)

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """Return the GPUs one by one, numbered in order as a container does."""
        ids = tuple(part.strip() for text in self.gpus for part in text.split(",") if part.strip())
        return tuple(sorted(ids, key=int)) if ids and all(gpu.isdigit() for gpu in ids) else ids

    def nodes(self, cores: int) -> list[tuple[str, NodeConfig, str]]:
        ids = self.gpu_ids
        if ids and ids[0].isdigit():
            ids = tuple(map(str, range(len(ids))))
        return nodes_of(self.cluster, 0 if ids else cores, ids)


def compose_of(config: ComposeConfig, cores: int = 0) -> JsonObject:
    """Return the compose file; nodes on CPUs share `cores`, or 0 leaves each of them all."""
    nodes = config.nodes(cores)
    services: JsonObject = {}
    if _shared(config):
        own = {"container_name": f"{config.name}-namespaces"}
        services["namespaces"] = _parts()["contained"] | _parts()["namespaces"] | own
    before: dict[str, str] = {}
    for name, node, visible in nodes:
        gpus = visible.split(",") if visible else []
        earlier = sorted({before[gpu] for gpu in gpus if gpu in before})
        services[name] = _node(config, name, node, visible, earlier)
        before |= dict.fromkeys(gpus, name)
    services["router"] = _router(config, [f"http://{name}:{_PORT}" for name, *_ in nodes])
    services |= _parts()["monitoring"]
    volumes: JsonObject = {name: {} for name in ("cache", "prometheus", "grafana")}
    return {
        "name": config.name,
        "services": services,
        "networks": {_KV: {"internal": True}},
        "volumes": volumes,
    }


def host_paths(config: ComposeConfig) -> list[str]:
    engine = config.cluster.node.engine
    named = [
        name
        for name in (engine.model, engine.generation_config)
        if name.startswith(("/", ".", "~"))
    ]
    named.append(config.cluster.node.chat_template)
    return list(
        dict.fromkeys(path for path in [*named, *(path for _, path in engine.adapters)] if path)
    )


def environment_of(
    config: ComposeConfig, draw: Callable[[], str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the .env file: images, secrets, and what is this host's own.

    `given` stays; `draw` makes the secrets that it lacks.
    """
    values = {
        name: draw() if value == "drawn" else value
        for name, value in _parts()["environment"].items()
    }
    if config.gpu_ids:
        values["KVRELAY_NODE_IMAGE"] = values["KVRELAY_NODE_IMAGE"].replace("cpu", "cuda")
    # An image named by us is of another size or release; another name is somebody else's.
    kept = {name: value for name, value in given.items() if not _OUR_IMAGE.fullmatch(value)}
    return values | kept


def _shared(config: ComposeConfig) -> dict[str, str]:
    if config.cluster.node.transfer.kv_connector not in ("auto", "direct"):
        return {}
    return dict.fromkeys(("pid", "ipc"), f"container:{config.name}-namespaces")


@cache
def _parts() -> dict[str, JsonObject]:
    text = Path(__file__).with_name("compose_parts.yaml").read_text("utf-8")
    return cast(dict[str, JsonObject], yaml.safe_load(text))


def _node(
    config: ComposeConfig, name: str, node: NodeConfig, visible: str, earlier: Sequence[str]
) -> JsonObject:
    role, engine = node.role, replace(node.engine, device="cuda" if visible else "cpu")
    # The secret itself comes with the environment; without one nodes may not listen on more than
    # the loopback.
    transfer = replace(node.transfer, kv_host=f"{_KV}-{name}", cluster_secret=f"${CLUSTER_SECRET}")
    node = replace(
        node,
        engine=engine,
        transfer=transfer,
        host="0.0.0.0",
        port=_PORT,
    )
    flags = flags_of(node, skip=NOT_FLAGS if engine.model else NOT_FLAGS | {"model"})
    shared = _shared(config)
    after = ({"namespaces": "service_started"} if shared else {}) | dict.fromkeys(
        earlier, "service_healthy"
    )
    service = {
        **_parts()["node"],
        "command": [role.value, *(flag.replace("$", "$$") for flag in flags)],
        **shared,
        "depends_on": {before: {"condition": condition} for before, condition in after.items()},
        # Also one name for all nodes of a role, for Prometheus.
        "networks": {"default": {"aliases": [role.value]}, _KV: {"aliases": [f"{_KV}-{name}"]}},
        "volumes": [
            f"cache:{_CACHE}",
            *(f"{path}:{path}:ro".replace("$", "$$") for path in host_paths(config)),
        ],
    }
    if not shared:
        service["shm_size"] = _parts()["namespaces"]["shm_size"]
    if visible:
        ids = list(config.gpu_ids)
        devices = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
        service["environment"] = service["environment"] | {"CUDA_VISIBLE_DEVICES": visible}
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
        service["ulimits"] = {"memlock": -1}  # UCX pins what it sends from
    return service | _parts()["contained"]


def _router(config: ComposeConfig, urls: Sequence[str]) -> JsonObject:
    cluster = config.cluster
    router = replace(
        cluster.router,
        prefill=tuple(urls[: cluster.prefill]),
        decode=tuple(urls[cluster.prefill :]),
        host="0.0.0.0",
        port=_PORT,
    )
    host = f"[{cluster.router.host}]" if ":" in cluster.router.host else cluster.router.host
    flags = flags_of(router, skip=NOT_FLAGS)
    return {
        **_parts()["router"],
        "command": ["router", *(flag.replace("$", "$$") for flag in flags)],
        "ports": [f"{host}:{cluster.router.port}:{_PORT}"],
        **_parts()["contained"],
    }


_MARK = "# Written by `kvrelay compose`"
_MONITORING = Path(__file__).parent / "monitoring"


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def absolute(values: Values) -> Values:
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


def write(values: Values, console: Console) -> int:
    """Write all files into their folder, and say what to type next. Raises ConfigError."""
    config = build(ComposeConfig, absolute(values))
    folder = Path(config.output)
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
