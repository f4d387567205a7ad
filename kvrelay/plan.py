"""The plan of a local cluster: which processes, with which flags and environment.

Pure: the machine comes in as a value. Owns ClusterConfig, the settings of `kvrelay up`. Starts
nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvrelay.settings import flags_of
from kvrelay.supervisor import ChildSpec
from kvrelay.wire.config import EngineConfig, NodeConfig, Role, TransferConfig
from kvrelay.wire.config_checks import check_keys, positive
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events_config import KvEventsConfig
from kvrelay.wire.router_config import RouterConfig

__all__ = [
    "ADMIN_KEY",
    "API_KEY",
    "CLUSTER_SECRET",
    "NODE_API_KEY",
    "RUNTIME_LORA",
    "ClusterConfig",
    "Machine",
    "NodeGpus",
    "cores_of",
    "gpus_of_nodes",
    "node_config",
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
# On ports that are free, which routers hear of from the nodes' health.
_KV_EVENTS = KvEventsConfig(True, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
_NOT_FLAGS = frozenset({"role", "api_key", "hf_token", "cluster_secret"})


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Prefill nodes, decode nodes and a router on this machine."""

    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    prefill: int = 1
    """Number of prefill nodes."""
    decode: int = 1
    """Number of decode nodes."""
    prefill_tensor_parallel_size: int = 0
    """Ranks of each prefill node; 0 takes tensor_parallel_size."""
    decode_tensor_parallel_size: int = 0
    """Ranks of each decode node; 0 takes tensor_parallel_size."""
    host: str = "127.0.0.1"
    """Address the router listens on; the nodes always listen on 127.0.0.1."""
    port: int = 8000
    """Port of the router; 0 takes a free one. The nodes take free ones."""
    served_model_name: str = ""
    """The name that clients use; empty takes the model's own."""
    chat_template: str = ""
    """A Jinja file that replaces the model's chat template."""
    trust_request_chat_template: bool = False
    """Requests may bring a chat template: a Jinja program, which runs in a sandbox."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: hermes (Qwen too), llama3_json, mistral, qwen3_coder,
    deepseek_v3, deepseek_v31, glm45, kimi_k2, openai (gpt-oss), granite, pythonic, json; auto takes
    it from the chat template or the model's type, none finds no calls.
    """
    reasoning_parser: str = "auto"
    """How the model reasons: qwen3, deepseek_r1, deepseek_v3, glm45, kimi_k2, openai_gptoss,
    granite, mistral, seed_oss; auto: as with tool_call_parser, none leaves it in the content.
    """
    tool_parser_plugin: str = ""
    """A Python file, run at start, which adds parsers of tool calls and of reasoning."""
    api_key: str = field(default="", repr=False)
    """If set, clients must send `Authorization: Bearer <api_key>`. The nodes get a random key of
    their own.
    """
    max_body_bytes: int = 16 << 20
    """Longest request body."""
    request_deadline_s: float = 600.0
    """A request may take this long."""
    strict_roles: bool = False
    """Decode nodes never compute a prompt that a prefill node can, and no node changes its role by
    itself.
    """
    start_deadline_s: float = 600.0
    """Each process must be ready within this time."""
    stop_deadline_s: float = 45.0
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
        for name, what in (("prefill", self.prefill), ("decode", self.decode)):
            if what < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {what}; for one node alone use `kvrelay serve`"
                )
        positive(
            self, "max_body_bytes", "request_deadline_s", "start_deadline_s", "stop_deadline_s"
        )
        check_keys(self, "api_key")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name, ranks in (
            ("prefill_tensor_parallel_size", self.prefill_tensor_parallel_size),
            ("decode_tensor_parallel_size", self.decode_tensor_parallel_size),
        ):
            if ranks < 0:
                raise ConfigError(
                    f"{name} must not be negative, got {ranks}; 0 takes tensor_parallel_size"
                )
        for role in (Role.PREFILL, Role.DECODE):
            # What a node would refuse is refused before anything starts.
            NodeConfig(
                self.engine_of(role),
                role,
                self.transfer,
                tool_call_parser=self.tool_call_parser,
                reasoning_parser=self.reasoning_parser,
                tool_parser_plugin=self.tool_parser_plugin,
            )

    def engine_of(self, role: Role) -> EngineConfig:
        """The engine of the nodes of a role."""
        own = (
            self.prefill_tensor_parallel_size
            if role is Role.PREFILL
            else self.decode_tensor_parallel_size
        )
        return replace(self.engine, tensor_parallel_size=own or self.engine.tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the plan must know of this machine."""

    cores: int
    gpus: tuple[str, ...]
    """Values for CUDA_VISIBLE_DEVICES, one per GPU."""
    ports: tuple[int, ...]
    """Free ports: the router's first, then one per node."""
    environ: Mapping[str, str] = field(repr=False)
    """The environment that the children start from."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of one node, as a value for CUDA_VISIBLE_DEVICES, and how many nodes share the
    busiest of them.
    """

    visible: str
    sharers: int


def gpus_of_nodes(ranks: Sequence[int], gpus: Sequence[str]) -> list[NodeGpus]:
    """The next `ranks` GPUs for each of the nodes, in turn. Raises ConfigError if there are too few
    for one node.
    """
    taken: list[list[str]] = []
    first = 0
    for count in ranks:
        if count > len(gpus):
            raise ConfigError(
                f"tensor_parallel_size {count} needs {count} GPUs for each node, and this machine "
                f"shows {len(gpus)}; "
                "lower it, or start ranks on other hosts with `kvrelay rank`"
            )
        first = first if first + count <= len(gpus) else 0
        taken.append(list(gpus[first : first + count]))
        first += count
    users = Counter(gpu for own in taken for gpu in own)
    return [NodeGpus(",".join(own), max(users[gpu] for gpu in own)) for own in taken]


def plan(config: ClusterConfig, machine: Machine, log_dir: Path, node_key: str) -> list[ChildSpec]:
    """The processes of the cluster, router last. Secrets go into the environment, everything else
    into flags.
    """
    roles = [Role.PREFILL] * config.prefill + [Role.DECODE] * config.decode
    # One from outside goes first: whoever wants to ask the nodes themselves, as `kvrelay doctor`
    # does, must know it.
    base = {**machine.environ, NODE_API_KEY: machine.environ.get(NODE_API_KEY) or node_key}
    for name in (API_KEY, CLUSTER_SECRET):
        base.pop(name, None)
    # For the nodes only: the router carries tickets and need not know what signs them.
    secret = config.transfer.cluster_secret
    for_nodes = base | ({CLUSTER_SECRET: secret} if secret else {})
    for_nodes.pop(ADMIN_KEY, None)
    urls: dict[Role, list[str]] = {Role.PREFILL: [], Role.DECODE: []}
    on_gpus = machine.gpus and config.engine.device != "cpu"
    engines = [config.engine_of(role) for role in roles]
    gpus = (
        gpus_of_nodes([engine.tensor_parallel_size for engine in engines], machine.gpus)
        if on_gpus
        else None
    )
    specs: list[ChildSpec] = []
    for index, (role, port) in enumerate(zip(roles, machine.ports[1:], strict=True)):
        share = cores_of(config, machine.cores) // engines[index].tensor_parallel_size
        threads = config.engine.threads or max(1, share)
        # A waiting thread that spins for long steals the core that another process needs, one that
        # never spins wakes too late. Decode step of SmolLM2, batch 8, two threads on two cores,
        # alone / beside another such engine: spinning 0: 105 ms / -; 3,000: 78 / 135; 30,000 (GNU
        # OpenMP's own is 300,000): 63 / 429.
        env = {"GOMP_SPINCOUNT": "3000"} | for_nodes | {"OMP_NUM_THREADS": str(threads)}
        engine = replace(engines[index], threads=threads)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[index].visible
            engine = sharing_memory(engine, gpus[index].sharers)
        url = f"http://127.0.0.1:{port}"
        flags = flags_of(node_config(config, engine, role, port), skip=_NOT_FLAGS)
        specs.append(_spec(f"{role}-{len(urls[role])}", role.value, flags, url, log_dir, env))
        urls[role].append(url)
    router = RouterConfig(
        prefill=tuple(urls[Role.PREFILL]),
        decode=tuple(urls[Role.DECODE]),
        host=config.host,
        port=machine.ports[0],
        max_body_bytes=config.max_body_bytes,
        request_deadline_s=config.request_deadline_s,
        strict_roles=config.strict_roles,
    )
    env = base | ({API_KEY: config.api_key} if config.api_key else {})
    url = reachable(config.host, machine.ports[0])
    return [
        *specs,
        _spec(
            "router",
            "router",
            flags_of(router, skip={"api_key", "node_api_key"}),
            url,
            log_dir,
            env,
        ),
    ]


def waves(nodes: Sequence[ChildSpec], machine: Machine) -> list[list[ChildSpec]]:
    """Nodes that may start at the same time: those that share a GPU measure its memory one after
    the other.
    """
    waves: list[list[ChildSpec]] = []
    turns: dict[str, int] = {}  # of the next node on a GPU
    for node in nodes:
        gpus = node.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if machine.gpus else []
        turn = max((turns.get(gpu, 0) for gpu in gpus), default=0)
        turns |= dict.fromkeys(gpus, turn + 1)
        waves += [[] for _ in range(turn + 1 - len(waves))]
        waves[turn].append(node)
    return waves


def reachable(host: str, port: int) -> str:
    """The URL under which a server that listens on `host` is reached from its own machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cores_of(config: ClusterConfig, cores: int) -> int:
    """Return how many of a machine's cores each node computes on: its share.

    On two cores 1P1D makes 248 tokens/s for 16 clients with a thread each, and 223 if the decode
    node has both cores, which the prefill node then wants, too.
    """
    return max(1, cores // (config.prefill + config.decode))


def sharing_memory(engine: EngineConfig, sharers: int) -> EngineConfig:
    """With the default share of a GPU's memory divided among the nodes on it. A share that was
    typed stays.
    """
    default = EngineConfig(engine.model).gpu_memory_utilization
    if sharers == 1 or engine.gpu_memory_utilization != default:
        return engine
    return replace(engine, gpu_memory_utilization=round(default / sharers, 3))


def node_config(config: ClusterConfig, engine: EngineConfig, role: Role, port: int) -> NodeConfig:
    """One node of the cluster."""
    return NodeConfig(
        engine=engine,
        role=role,
        transfer=config.transfer,
        port=port,
        kv_events_config=_KV_EVENTS,
        served_model_name=config.served_model_name,
        chat_template=config.chat_template,
        trust_request_chat_template=config.trust_request_chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        tool_parser_plugin=config.tool_parser_plugin,
        max_body_bytes=config.max_body_bytes,
        request_deadline_s=config.request_deadline_s,
        start_deadline_s=config.start_deadline_s,
    )


def _spec(
    name: str, command: str, flags: Sequence[str], url: str, log_dir: Path, env: Mapping[str, str]
) -> ChildSpec:
    # -P: what lies in the folder where `kvrelay up` is typed must not be imported in place of our
    # packages.
    words = (sys.executable, "-P", "-u", "-m", "kvrelay.cli", command, *flags)
    return ChildSpec(name, words, f"{url}/health", log_dir / f"{name}.log", env)
