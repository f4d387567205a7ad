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
from kvrelay.wire.kv_events import KvEventsConfig
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
    "NodeGpus",
    "cores_of",
    "gpus_of_nodes",
    "plan",
    "reachable",
    "sharing_memory",
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
# On free ports, of which routers hear by the nodes' health.
_KV_EVENTS = KvEventsConfig(True, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
# What a cluster decides for its nodes, or what means its router.
_NOT_OF_NODES = (
    *("role", "host", "port", "api_key", "router", "kv_events_config", "root_path"),
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
    """Processes that have not ended this long after SIGTERM are killed. Nodes and the router drain
    for 30 s of it.
    """
    log_dir: str = ""
    """Folder for the logs, one file per process; nobody else may open them. Empty makes one in the
    system's temporary folder.
    """
    demo: bool = False
    """Answer one chat as a proof when the cluster is ready."""
    demo_exit: bool = False
    """Like demo, and stop everything after it."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.router.ssl_cert_reqs < 2,
            "ssl_cert_reqs 2 would keep out `kvrelay up` itself, which asks its router whether it "
            "is ready; start nodes and a `kvrelay router` one by one",
        )
        for role in (Role.PREFILL, Role.DECODE):
            self.node_of(role)  # what a node would refuse is refused before anything starts

    @property
    def roles(self) -> list[Role]:
        """Return the role of each node, prefill nodes first."""
        return [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode

    def node_of(self, role: Role) -> NodeConfig:
        """Return the config of the nodes of a role."""
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
    """A machine as the plan must know it."""

    cores: int
    gpus: tuple[str, ...]
    """Values for CUDA_VISIBLE_DEVICES, one per GPU."""
    ports: tuple[int, ...]
    """Free ports: the router's first, then one per node."""
    environ: Mapping[str, str] = field(repr=False)
    """The environment that the children start from."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node's GPUs (for CUDA_VISIBLE_DEVICES); `sharers` nodes are on its busiest one."""

    visible: str
    sharers: int


def gpus_of_nodes(ranks: Sequence[int], gpus: Sequence[str]) -> list[NodeGpus]:
    """Return GPUs for each of the nodes, in turn. Raises ConfigError if one needs more than all."""
    taken: list[list[str]] = []
    first = 0
    for count in ranks:
        if count > len(gpus):
            raise ConfigError(
                f"tensor_parallel_size {count} needs {count} GPUs for each node, and this machine "
                f"shows {len(gpus)}; lower it, or start ranks on other hosts with `kvrelay rank`"
            )
        first = first if first + count <= len(gpus) else 0
        taken.append(list(gpus[first : first + count]))
        first += count
    users = Counter(gpu for own in taken for gpu in own)
    return [NodeGpus(",".join(own), max(users[gpu] for gpu in own)) for own in taken]


def plan(config: ClusterConfig, machine: Machine, log_dir: Path) -> list[ChildSpec]:
    """Return the processes of a cluster, its router last."""
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
    roles = config.roles
    nodes = [config.node_of(role) for role in roles]
    # Only nodes sign tickets: the router, which carries them, need not know the secret.
    secrets = {
        NODE_API_KEY: config.router.node_api_key,
        CLUSTER_SECRET: config.node.transfer.cluster_secret,
    }
    gpus = None
    if machine.gpus and config.node.engine.device != "cpu":
        ranks = [node.engine.tensor_parallel_size for node in nodes]
        gpus = gpus_of_nodes(ranks, machine.gpus)
    specs: list[ChildSpec] = []
    for at, (node, port) in enumerate(zip(nodes, machine.ports[1:], strict=True)):
        share = cores_of(config, machine.cores) // node.engine.tensor_parallel_size
        engine = replace(node.engine, threads=node.engine.threads or max(1, share))
        # A waiting thread that spins for long steals the core that another process needs, one that
        # never spins wakes too late. Decode step of SmolLM2, batch 8, two threads on two cores,
        # alone / beside another such engine: spinning 0: 105 ms / -; 3,000: 78 / 135; 30,000 (GNU
        # OpenMP's own is 300,000): 63 / 429.
        env = {"GOMP_SPINCOUNT": "3000"} | _environ(machine, secrets)
        env["OMP_NUM_THREADS"] = str(engine.threads)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[at].visible
            engine = sharing_memory(engine, gpus[at].sharers)
        role = node.role
        name = f"{role}-{at - (config.prefill if role is Role.DECODE else 0)}"
        node = replace(node, engine=engine, port=port, kv_events_config=_KV_EVENTS)
        flags = flags_of(node, skip=NOT_FLAGS)
        specs.append(_spec(name, role.value, flags, f"http://127.0.0.1:{port}", log_dir, env))
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
    """Return the URL under which a server is reached from its own machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"


def cores_of(config: ClusterConfig, cores: int) -> int:
    """Return how many of a machine's cores each node computes on: its share.

    On two cores 1P1D makes 248 tokens/s for 16 clients with a thread each, and 223 if the decode
    node has both cores, which the prefill node then wants, too.
    """
    return max(1, cores // (config.prefill + config.decode))


def sharing_memory(engine: EngineConfig, sharers: int) -> EngineConfig:
    """Divide the default share of a GPU's memory among the nodes on it; another share stays."""
    default = EngineConfig(engine.model).gpu_memory_utilization
    if sharers == 1 or engine.gpu_memory_utilization != default:
        return engine
    return replace(engine, gpu_memory_utilization=round(default / sharers, 3))


def _spec(
    name: str, command: str, flags: Sequence[str], url: str, log_dir: Path, env: Mapping[str, str]
) -> ChildSpec:
    # -P: what lies in the folder where `kvrelay up` is typed must not be imported in place of our
    # packages.
    words = (sys.executable, "-P", "-u", "-m", "kvrelay.cli", command, *flags)
    return ChildSpec(name, words, f"{url}/health", log_dir / f"{name}.log", env)
