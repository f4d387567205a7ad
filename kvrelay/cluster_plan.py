"""The plan of a local cluster: which processes, with which flags and environment.

Pure: the machine comes in as a value.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvrelay.settings import flags_of, without
from kvrelay.supervisor import ChildSpec
from kvrelay.wire.config import EngineConfig, NodeConfig, Role
from kvrelay.wire.config_checks import OrDefault, Positive, check_fields, require
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig

__all__ = [
    "ADMIN_KEY",
    "API_KEY",
    "CLUSTER_SECRET",
    "NODE_API_KEY",
    "NOT_FLAGS",
    "RUNTIME_LORA",
    "ClusterConfig",
    "Machine",
    "nodes_of",
    "plan",
    "reachable",
    "waves",
]

ADMIN_KEY = "KVRELAY_ADMIN_KEY"
API_KEY = "KVRELAY_API_KEY"
NODE_API_KEY = "KVRELAY_NODE_API_KEY"
CLUSTER_SECRET = "KVRELAY_CLUSTER_SECRET"
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
NOT_FLAGS = frozenset(
    {"role", "api_key", "admin_key", "node_api_key", "hf_token", "cluster_secret"}
)
"""Settings of a child that are its command, or secrets, which its environment holds."""
# What a cluster decides for its nodes, or what means its router.
_NOT_OF_NODES = (
    *("role", "host", "port", "api_key", "router", "root_path"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A cluster on this machine: prefill nodes, decode nodes and a router.

    Nodes listen on 127.0.0.1 alone.
    """

    node: NodeConfig = field(metadata=without(*_NOT_OF_NODES))
    router: RouterConfig = field(default=RouterConfig(), metadata=without("prefill", "decode"))
    prefill: Annotated[int, Meta(ge=1, description="for one node alone use `kvrelay serve`")] = 1
    """Number of prefill nodes."""
    decode: Annotated[int, Meta(ge=1, description="for one node alone use `kvrelay serve`")] = 1
    """Number of decode nodes."""
    prefill_tensor_parallel_size: OrDefault = 0
    """Ranks of each prefill node; 0 takes tensor_parallel_size."""
    decode_tensor_parallel_size: OrDefault = 0
    """Ranks of each decode node; 0 takes tensor_parallel_size."""
    stop_deadline_s: Positive = 45.0
    """Time from SIGTERM until processes are killed. Nodes and the router drain for 30 s of it."""
    log_dir: str = ""
    """Folder for the logs, one file per process, closed to other users. Empty makes one in the
    system's temporary folder.
    """
    demo: bool = False
    """Answer one chat as a demonstration when the cluster is ready."""
    demo_exit: bool = False
    """Like demo, then stop everything."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.router.ssl_cert_reqs < 2,
            "ssl_cert_reqs 2 would keep out `kvrelay up` itself, which asks its router whether it "
            "is ready; start nodes and a `kvrelay router` one by one",
        )
        for role in (Role.PREFILL, Role.DECODE):
            self.node_of(role)

    @property
    def roles(self) -> list[Role]:
        return [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode

    def node_of(self, role: Role) -> NodeConfig:
        own = (
            self.prefill_tensor_parallel_size
            if role is Role.PREFILL
            else self.decode_tensor_parallel_size
        )
        engine = self.node.engine
        engine = replace(engine, tensor_parallel_size=own or engine.tensor_parallel_size)
        return replace(self.node, role=role, engine=engine)


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpus: tuple[str, ...]
    """Values for CUDA_VISIBLE_DEVICES, one per GPU."""
    ports: tuple[int, ...]
    """Free ports: the router's first, then one per node."""
    environ: Mapping[str, str] = field(repr=False)


def nodes_of(
    config: ClusterConfig, cores: int, gpus: Sequence[str]
) -> list[tuple[str, NodeConfig, str]]:
    """Return name, config and GPUs (for CUDA_VISIBLE_DEVICES) of each node, prefill nodes first.

    Nodes share `cores` (0 leaves each of them all), and the default share of a GPU's memory. On two
    cores 1P1D makes 248 tokens/s for 16 clients with a thread each, and 223 if the decode node has
    both. Raises ConfigError if a node needs more than all GPUs.
    """
    roles = config.roles
    nodes = [config.node_of(role) for role in roles]
    taken: list[Sequence[str]] = []
    first = 0
    for node in nodes:
        count = node.engine.tensor_parallel_size if gpus else 0
        if count > len(gpus):
            raise ConfigError(
                f"tensor_parallel_size {count} needs {count} GPUs for each node, and this machine "
                f"shows {len(gpus)}; lower it, or start ranks on other hosts with `kvrelay rank`"
            )
        first = first if first + count <= len(gpus) else 0
        taken.append(gpus[first : first + count])
        first += count
    users = Counter(gpu for own in taken for gpu in own)
    found = []
    for at, (role, node, own) in enumerate(zip(roles, nodes, taken, strict=True)):
        engine = node.engine
        default = EngineConfig(engine.model).gpu_memory_utilization
        if engine.gpu_memory_utilization == default:
            sharers = max((users[gpu] for gpu in own), default=1)
            engine = replace(engine, gpu_memory_utilization=round(default / sharers, 3))
        if cores and not engine.threads:
            share = max(1, cores // len(roles)) // engine.tensor_parallel_size
            engine = replace(engine, threads=max(1, share))
        name = f"{role}-{at - (config.prefill if role is Role.DECODE else 0)}"
        found.append((name, replace(node, engine=engine), ",".join(own)))
    return found


def plan(config: ClusterConfig, machine: Machine, log_dir: Path) -> list[ChildSpec]:
    nodes = _node_specs(config, machine, log_dir)
    urls = [node.health_url.removesuffix("/health") for node in nodes]
    router = replace(
        config.router,
        prefill=tuple(urls[: config.prefill]),
        decode=tuple(urls[config.prefill :]),
        port=machine.ports[0],
    )
    keys = {
        API_KEY: router.api_key,
        ADMIN_KEY: router.admin_key,
        NODE_API_KEY: router.node_api_key,
    }
    spec = _spec(
        "router",
        "router",
        flags_of(router, skip=NOT_FLAGS),
        reachable(router),
        log_dir,
        _environ(machine, keys),
    )
    return [*nodes, spec]


def _node_specs(config: ClusterConfig, machine: Machine, log_dir: Path) -> list[ChildSpec]:
    # Only nodes sign tickets: the router, which carries them, need not know the secret.
    secrets = {
        NODE_API_KEY: config.router.node_api_key,
        CLUSTER_SECRET: config.node.transfer.cluster_secret,
    }
    gpus = () if config.node.engine.device == "cpu" else machine.gpus
    specs: list[ChildSpec] = []
    nodes = nodes_of(config, machine.cores, gpus)
    for (name, node, visible), port in zip(nodes, machine.ports[1:], strict=True):
        # A waiting thread that spins for long steals the core that another process needs, one that
        # never spins wakes too late. Decode step of SmolLM2, batch 8, two threads on two cores,
        # alone / beside another such engine: spinning 0: 105 ms / -; 3,000: 78 / 135; 30,000 (GNU
        # OpenMP's own is 300,000): 63 / 429.
        env = {"GOMP_SPINCOUNT": "3000"} | _environ(machine, secrets)
        env["OMP_NUM_THREADS"] = str(node.engine.threads)
        if visible:
            env["CUDA_VISIBLE_DEVICES"] = visible
        flags = flags_of(replace(node, port=port), skip=NOT_FLAGS)
        url = f"http://127.0.0.1:{port}"
        specs.append(_spec(name, node.role.value, flags, url, log_dir, env))
    return specs


def _environ(machine: Machine, secrets: Mapping[str, str]) -> dict[str, str]:
    ours = {API_KEY, ADMIN_KEY, NODE_API_KEY, CLUSTER_SECRET}
    kept = {name: value for name, value in machine.environ.items() if name not in ours}
    return kept | {name: value for name, value in secrets.items() if value}


def waves(nodes: Sequence[ChildSpec], machine: Machine) -> list[list[ChildSpec]]:
    """Group nodes that may start together: those on one GPU measure its memory in turn."""
    waves: list[list[ChildSpec]] = []
    turns: dict[str, int] = {}  # of the next node on a GPU
    for node in nodes:
        gpus = node.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if machine.gpus else []
        turn = max((turns.get(gpu, 0) for gpu in gpus), default=0)
        turns |= dict.fromkeys(gpus, turn + 1)
        waves += [[] for _ in range(turn + 1 - len(waves))]
        waves[turn].append(node)
    return waves


def reachable(config: RouterConfig | NodeConfig) -> str:
    return config.url_at({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host))


def _spec(
    name: str, command: str, flags: Sequence[str], url: str, log_dir: Path, env: Mapping[str, str]
) -> ChildSpec:
    # -P: nothing in the working folder may be imported in place of our packages.
    words = (sys.executable, "-P", "-u", "-m", "kvrelay.cli", command, *flags)
    return ChildSpec(name, words, f"{url}/health", log_dir / f"{name}.log", env)
