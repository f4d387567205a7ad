"""Frozen, typed configuration. Checked once when made, never rewritten; what is measured later is a new value."""

from __future__ import annotations

import enum
import ipaddress
import json
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from wire.errors import ConfigError
from wire.key_config import KeyConfig

__all__ = [
    "MAX_URL_CHARS",
    "POLICY_NAMES",
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "EngineConfig",
    "NodeConfig",
    "RanksConfig",
    "Role",
    "RouterConfig",
    "TransferConfig",
    "is_base_url",
    "is_loopback",
]

# How a router may choose nodes (router/policies/).
POLICY_NAMES = ("cost", "least_queue", "power_of_two", "prefix", "random", "round_robin", "session")
MIN_SECRET_CHARS = 16
MAX_LORA_RANK = 512
MAX_URL_CHARS = 512
# Each proposal costs a row of a step, whether it comes true or not.
MAX_SPECULATIVE_TOKENS = 32
MAX_NGRAM = 16
MAX_WORKERS = 256


class Role(enum.StrEnum):
    """What a node does with a request. A run-time value of one kind of process."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"[^\s:]+:(\d+)", text)
    return found is not None and 0 < int(found[1]) < 65536


def is_loopback(host: str) -> bool:
    """Whether an address leads to its own machine, whatever a name server says: localhost, 127.0.0.0/8 or ::1."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_base_url(url: str) -> bool:
    """Whether a node may be asked there: http or https and a host, without query, user or password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment) and parts.username is None and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain and len(url) <= MAX_URL_CHARS


def _named_adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
            name, path = fields["name"], fields["path"] if "path" in fields else fields["local_path"]
        except (ValueError, KeyError, TypeError) as why:
            raise ConfigError(f"lora {text!r} must be JSON with name and path, or name=path") from why
        equals = "=" if isinstance(name, str) and isinstance(path, str) else ""
    _require(bool(equals and name and path), f"lora {text!r} must be name=path of a folder in PEFT's layout")
    return name, path


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(value > 0, f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one node."""

    model: str
    """A folder in Hugging Face layout, a .gguf file, a config.json (with load_format dummy), or on the Hub org/name,
    org/name@revision or org/name/file.gguf."""
    revision: str = ""
    """Branch, tag or commit of a model on the Hub; empty takes main."""
    hub_token: str = field(default="", repr=False)
    """For private and gated models on the Hub; better put it into the environment as HF_TOKEN."""
    load_format: str = "auto"
    """auto, safetensors, gguf or dummy (random weights of the right shapes)."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto (fp32 on CPU, the model's own on CUDA), float32, bfloat16 or float16."""
    max_model_len: int = 0
    """Longest prompt plus answer in tokens; 0 takes the model's own, or less if the KV pool is too small for it."""
    block_tokens: int = 0
    """Tokens of KV in one block, 16, 32 or 64; equal on all nodes of a cluster. 0 takes 16 on CPU, 64 on CUDA."""
    kv_cache_memory: int = 0
    """Bytes of the KV pool of one rank; 0 takes 1 GiB on CPU, on CUDA what gpu_memory_utilization leaves for it."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that one process may use, KV pool included."""
    kv_cache_dtype: str = "auto"
    """auto (the compute dtype) or fp8 (e4m3 with a scale per token and head; CUDA only); equal on all nodes."""
    quantization: str = ""
    """fp8 quantizes the weights of linear layers while loading (e4m3 with a scale per channel; CUDA only)."""
    max_batched_tokens: int = 0
    """Tokens one step computes at most, shared by prefill chunks and decodes; 0 takes 128 on CPU, 8192 on CUDA."""
    max_running: int = 0
    """Requests computed in one step at most; 0 takes 64 on CPU, 256 on CUDA."""
    tensor_parallel: int = 1
    """Ranks that share the model, each a process with a GPU of its own."""
    tensor_parallel_address: str = ""
    """host:port of rank 0 at which the ranks meet; may stay empty when all of them run on this host."""
    tensor_parallel_local: int = 0
    """How many of the ranks run on this host; 0 for all. The others are started with `kvrelay rank`."""
    prefix_cache: bool = True
    """Reuse the KV of equal prefixes."""
    batch_invariant: bool = False
    """Fixed tiles and splits: tokens do not depend on the batch. (The CPU path always is.)"""
    speculative_tokens: int = 0
    """Tokens that a decode step proposes per request at most, by looking its newest ones up in its own text, and checks
    in the same step; the answer stays the same. 0 proposes none."""
    ngram_max: int = 4
    """Longest run of newest tokens that speculative_tokens looks up."""
    ngram_min: int = 2
    """Shortest run of newest tokens that speculative_tokens looks up."""
    threads: int = 0
    """CPU threads of the engine; 0 takes all cores of this machine."""
    lora: tuple[str, ...] = ()
    """A LoRA adapter, name=path of a folder in PEFT's layout; clients choose it by its name as their model. Give it
    again for more; equal on all nodes of a cluster."""
    max_loras: int = 0
    """How many adapters can be loaded at once, each in a slot of its own; 0 takes as many as are named with lora, and
    with allow_runtime_lora at least 1."""
    max_lora_rank: int = 16
    """Highest rank of an adapter; each slot takes memory for it."""
    allow_runtime_lora: bool = False
    """Serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter: who may ask this node may have it read any folder
    of its machine."""

    def __post_init__(self) -> None:
        _positive(self, "tensor_parallel", "max_lora_rank")
        self._check_adapters()
        in_fp8 = self.kv_cache_dtype == "fp8" or bool(self.quantization)
        _require(
            not (in_fp8 and self.device == "cpu"), "kv_cache_dtype and quantization fp8 need a GPU; leave them out"
        )
        _require(
            not (self.batch_invariant and (self.quantization or self.tensor_parallel > 1)),
            "batch_invariant does not go with quantization fp8 or tensor_parallel, whose sums depend on the batch; "
            "leave one of them out",
        )
        _require(
            self.tensor_parallel_local in range(self.tensor_parallel + 1),
            f"tensor_parallel_local must be between 0 and tensor_parallel ({self.tensor_parallel}), got "
            f"{self.tensor_parallel_local}",
        )
        _require(
            bool(self.tensor_parallel_address) or self.tensor_parallel_local in (0, self.tensor_parallel),
            "ranks on other hosts need tensor_parallel_address, the host:port of rank 0",
        )
        _require(
            not self.tensor_parallel_address or _is_address(self.tensor_parallel_address),
            f"tensor_parallel_address must be host:port, got {self.tensor_parallel_address!r}",
        )
        for name in ("kv_cache_memory", "max_running"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} must not be negative, got {value}; 0 takes the default")
        _require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}",
        )
        _require(
            self.kv_cache_dtype in ("auto", "fp8"), f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of auto, fp8"
        )
        _require(self.quantization in ("", "fp8"), f"quantization {self.quantization!r} is not fp8 or empty")
        _require(
            self.load_format in ("auto", "safetensors", "gguf", "dummy"),
            f"load_format {self.load_format!r} is not one of auto, safetensors, gguf, dummy",
        )
        _require(self.device in ("auto", "cpu", "cuda"), f"device {self.device!r} is not one of auto, cpu, cuda")
        _require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            f"dtype {self.dtype!r} is not one of auto, float32, bfloat16, float16",
        )
        _require(self.block_tokens in (0, 16, 32, 64), f"block_tokens must be 16, 32 or 64, got {self.block_tokens}")
        _require(
            self.max_batched_tokens >= 0,
            f"max_batched_tokens must not be negative, got {self.max_batched_tokens}; 0 takes the device's default",
        )
        _require(
            self.max_model_len >= 0,
            f"max_model_len must not be negative, got {self.max_model_len}; 0 takes the model's own",
        )
        _require(
            0 <= self.speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            f"speculative_tokens must be between 0 and {MAX_SPECULATIVE_TOKENS}, got {self.speculative_tokens}",
        )
        _require(
            1 <= self.ngram_min <= self.ngram_max <= MAX_NGRAM,
            f"ngram_min and ngram_max must be between 1 and {MAX_NGRAM}, the first not above the second, got "
            f"{self.ngram_min} and {self.ngram_max}",
        )
        _require(self.threads >= 0, f"threads must not be negative, got {self.threads}; 0 takes all cores")

    def _check_adapters(self) -> None:
        names = [name for name, _ in self.adapters]
        twice = sorted({name for name in names if names.count(name) > 1})
        _require(not twice, f"lora names {', '.join(twice)} twice; give each adapter a name of its own")
        _require(
            self.max_lora_rank <= MAX_LORA_RANK,
            f"max_lora_rank must be at most {MAX_LORA_RANK}, got {self.max_lora_rank}",
        )
        _require(self.max_loras >= 0, f"max_loras must not be negative, got {self.max_loras}; 0 takes what lora names")
        _require(
            not self.max_loras or len(names) <= self.max_loras,
            f"lora names {len(names)} adapters and max_loras is {self.max_loras}; raise it or leave it out",
        )

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """The adapters of `lora`: name and path. Raises ConfigError for one that is neither name=path nor JSON."""
        return [_named_adapter(text) for text in self.lora]

    @property
    def adapter_slots(self) -> int:
        """How many adapters can be loaded at once; 0: none, and nothing is prepared for any."""
        return self.max_loras or max(len(self.lora), int(self.allow_runtime_lora))

    def threads_on(self, cores: int) -> int:
        """CPU threads of each rank on a machine with so many cores."""
        return self.threads or max(1, cores // (self.tensor_parallel_local or self.tensor_parallel))


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """The ranks of a tensor-parallel engine that run on a host other than rank 0's."""

    engine: EngineConfig
    """Equal to rank 0's, but for tensor_parallel_local, the number of ranks here."""
    first_rank: int = 1
    """Rank of the first one here."""

    def __post_init__(self) -> None:
        size, local = self.engine.tensor_parallel, self.engine.tensor_parallel_local
        _require(bool(self.engine.tensor_parallel_address), "name rank 0's host:port with tensor_parallel_address")
        _require(local > 0, "say with tensor_parallel_local how many ranks run here")
        _require(local < size, f"tensor_parallel_local {local} leaves no rank 0 elsewhere; give fewer than {size}")
        _require(
            0 < self.first_rank <= size - local,
            f"first_rank must be between 1 and {size - local}, so that {local} ranks fit into {size}, "
            f"got {self.first_rank}",
        )


TOOL_CALL_PARSERS = ("hermes", "llama3", "mistral", "json")
REASONING_PARSERS = ("think",)
_CONNECTORS = ("auto", "direct", "nixl", "nccl")
_FAILURE_POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The hand-over: who may take KV from here, and for how long it is kept."""

    kv_connector: str = "auto"
    """What moves KV: direct (nodes of one host map each other's memory), nixl, nccl; auto: each pair of nodes takes the
    first of these that both have."""
    kv_host: str = "127.0.0.1"
    """Address at which peers reach this node's control channel."""
    kv_port: int = 0
    """Port of the control channel; 0 takes a free one."""
    cluster_secret: str = field(default="", repr=False)
    """One secret for all nodes of a cluster, at least 16 characters: it encrypts their control channels and signs their
    tickets; better put it into the environment as KVRELAY_CLUSTER_SECRET. Without one a node hands KV over on its own
    machine only."""
    lease_s: float = 5.0
    """KV is kept this long after the last heartbeat for it."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a node that wants KV."""
    transfer_deadline_s: float = 10.0
    """A fetch may take this long, plus its size at `transfer_floor_bytes_s`."""
    transfer_floor_bytes_s: float = 100e6
    """The slowest transfer, in bytes per second, that is waited for."""
    kv_load_failure_policy: str = "recompute"
    """What a decode node does when KV does not come: recompute (from the first missing block on) or fail (end the
    request with an error)."""

    def __post_init__(self) -> None:
        _require(
            self.kv_connector in _CONNECTORS,
            f"kv_connector {self.kv_connector!r} is not one of {', '.join(_CONNECTORS)}",
        )
        _require(
            self.kv_load_failure_policy in _FAILURE_POLICIES,
            f"kv_load_failure_policy {self.kv_load_failure_policy!r} is not one of {', '.join(_FAILURE_POLICIES)}",
        )
        # Never the secret itself in an error: it would end in a log.
        _require(
            not self.cluster_secret or len(self.cluster_secret) >= MIN_SECRET_CHARS,
            f"cluster_secret must have at least {MIN_SECRET_CHARS} characters, got {len(self.cluster_secret)}; draw "
            "one at random, for example with `openssl rand -hex 32`",
        )
        _require(
            bool(self.cluster_secret) or is_loopback(self.kv_host),
            f"without cluster_secret kv_host must be a loopback address, got {self.kv_host!r}; set the same "
            "KVRELAY_CLUSTER_SECRET on all nodes",
        )
        _require(0 <= self.kv_port < 65536, f"kv_port must be between 0 and 65535, got {self.kv_port}")
        _positive(self, "lease_s", "heartbeat_s", "transfer_deadline_s", "transfer_floor_bytes_s")
        _require(
            self.lease_s >= 3 * self.heartbeat_s,
            f"lease_s must be at least three heartbeats ({3 * self.heartbeat_s:g} s), got {self.lease_s:g}; "
            "one lost heartbeat must not lose a lease",
        )


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node: an HTTP process and an engine process."""

    engine: EngineConfig
    role: Role = Role.AGGREGATED
    transfer: TransferConfig = TransferConfig()
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    served_model_name: str = ""
    """The name that clients use; empty takes the model's own."""
    chat_template: str = ""
    """A Jinja file that replaces the model's chat template."""
    trust_request_chat_template: bool = False
    """Requests may bring a chat template: a Jinja program, which runs in a sandbox."""
    tool_call_parser: str = ""
    """How the model writes tool calls: hermes (Qwen too), llama3, mistral or json. Tool choice auto needs it."""
    reasoning_parser: str = ""
    """How the model reasons: think (<think>...</think>). Reasoning then is reasoning_content and not content."""
    api_key: str = ""
    """If set, /v1 and /kv routes want `Authorization: Bearer <api_key>`."""
    max_body_bytes: int = 16 << 20
    """Longest request body. What a leg is handed over beside it does not count."""
    request_deadline_s: float = 600.0
    """A request may take this long."""
    start_deadline_s: float = 600.0
    """The engine process must be ready within this time."""
    router: tuple[str, ...] = ()
    """A router to which this node announces itself, as tcp://HOST:PORT with the router's heartbeat_port. Give it again
    for more."""
    log_bodies: bool = False
    """Log the first 2,000 characters of each request's body. Never without being asked: they are people's words."""
    kv_events: bool = True
    """Tell routers which blocks the prefix cache holds: hashes, in vLLM's format (ZMQ)."""
    kv_events_port: int = 0
    """Port of the KV events, at this node's host; the one after it answers who has lost some. 0 takes free ones."""

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, f"port must be between 0 and 65535, got {self.port}")
        _require(
            0 <= self.kv_events_port < 65535,
            f"kv_events_port must be between 0 and 65534, got {self.kv_events_port}",
        )
        _positive(self, "max_body_bytes", "request_deadline_s", "start_deadline_s")
        for router in self.router:
            scheme, _, address = router.partition("://")
            host, _, port = address.rpartition(":")
            valid = scheme == "tcp" and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
            _require(bool(valid), f"router must be tcp://HOST:PORT, got {router!r}")
            _require(
                bool(self.api_key) or is_loopback(host.strip("[]")),
                f"router {router} is on another machine and hears only who signs with its node_api_key; set the same "
                "KVRELAY_NODE_API_KEY on all",
            )
        _require(
            not self.router or self.role is not Role.AGGREGATED,
            "router is for prefill and decode nodes: a router has no use for a node alone",
        )
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            _require(value in ("", *known), f"{name} {value!r} is not one of {', '.join(known)}")

    @property
    def url(self) -> str:
        """Where others reach this node: its host, or kv_host if it listens on all addresses."""
        host = self.transfer.kv_host if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The OpenAI endpoint in front of the nodes."""

    prefill: tuple[str, ...] = ()
    """Base URLs of prefill nodes, for example http://127.0.0.1:8100."""
    decode: tuple[str, ...] = ()
    """Base URLs of decode nodes."""
    heartbeat_port: int = 0
    """Port on which nodes announce themselves (their --router), on the address of host and signed with node_api_key; 0
    hears none."""
    kubernetes_selector: str = ""
    """Nodes are the pods with a label kvrelay/role (prefill or decode) that this label selector matches; empty asks no
    API server."""
    kubernetes_namespace: str = ""
    """Namespace of these pods; empty takes the router's own."""
    alias: tuple[str, ...] = ()
    """A further name for a model or an adapter, name=model: clients may ask for either. Give it again for more."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    workers: int = 1
    """Processes that serve the port; more than one share it, and a parent process keeps what they have in common."""
    api_key: str = ""
    """If set, clients must send `Authorization: Bearer <api_key>`. It may do everything."""
    keys: tuple[KeyConfig, ...] = ()
    """More API keys, each with its name, hash, limits and share; in a file a list of mappings."""
    node_api_key: str = ""
    """Sent to the nodes."""
    admin_key: str = ""
    """What /admin routes want as `Authorization: Bearer <admin_key>`; without one they answer this machine only."""
    max_body_bytes: int = 16 << 20
    """Longest request body."""
    request_deadline_s: float = 600.0
    """A request may take this long."""
    connect_deadline_s: float = 2.0
    """A connection to a node must stand within this time."""
    health_interval_s: float = 0.5
    """Time between two health checks of a node."""
    health_deadline_s: float = 2.0
    """A health check must be answered within this time."""
    max_queue: int = 1000
    """Requests that wait while all nodes are busy, for each model; more are refused with 429. Divided among workers."""
    ttft_target_ms: float = 0.0
    """Requests whose first token would come later than this are refused at once, with 429; 0 refuses none. Clients may
    send their own as x-slo-ttft-ms."""
    tpot_target_ms: float = 0.0
    """Requests wait while one more would make a token take longer than this; 0 is no target. Clients may send a
    stricter one as x-slo-tpot-ms."""
    max_connections: int = 16384
    """Connections of clients at once; more are refused with 503. Divided among workers."""
    tls_cert: str = ""
    """A PEM file with the router's certificate and its chain: it then serves https."""
    tls_key: str = ""
    """The PEM file with the certificate's private key, if that is a file of its own."""
    tls_ca: str = ""
    """A PEM file with the authorities to trust for https:// nodes; empty takes the system's."""
    attempts: int = 3
    """How many nodes a leg is tried on before the client gets an error."""
    prefill_policy: str = "cost"
    """How a prefill node is chosen: cost, prefix, session, least_queue, power_of_two, round_robin or random."""
    decode_policy: str = "cost"
    """How a decode node is chosen: one of the same."""
    conditional_disaggregation: bool = True
    """Compute a short prompt on its decode node where that is faster by the measured costs. Without it decode nodes
    compute prompts only where no prefill node can."""
    p2p_nccl_port: int = 0
    """If set, vLLM nodes with a P2pNcclConnector can name themselves on this port (their proxy_port) without a key."""
    log_bodies: bool = False
    """Log the first 2,000 characters of each request's body. Never without being asked: they are people's words."""

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, f"port must be between 0 and 65535, got {self.port}")
        _require(
            0 <= self.p2p_nccl_port < 65536, f"p2p_nccl_port must be between 0 and 65535, got {self.p2p_nccl_port}"
        )
        _positive(
            self,
            "max_body_bytes",
            "request_deadline_s",
            "connect_deadline_s",
            "health_interval_s",
            "health_deadline_s",
            "attempts",
            "max_connections",
            "workers",
        )
        _require(self.workers <= MAX_WORKERS, f"workers must be at most {MAX_WORKERS}, got {self.workers}")
        self._check_entry()
        for role in ("prefill", "decode"):
            name = getattr(self, f"{role}_policy")
            _require(name in POLICY_NAMES, f"{role}_policy must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
        for url in (*self.prefill, *self.decode):
            _require(
                is_base_url(url), f"node address {url!r} must start with http:// or https://, and name a host and port"
            )
        _require(
            0 <= self.heartbeat_port < 65536, f"heartbeat_port must be between 0 and 65535, got {self.heartbeat_port}"
        )
        _require(
            not self.heartbeat_port or bool(self.node_api_key) or is_loopback(self.host),
            f"heartbeat_port on {self.host} needs node_api_key, which nodes sign with; set the same "
            "KVRELAY_NODE_API_KEY on all, or listen on 127.0.0.1",
        )
        _require(
            not self.kubernetes_namespace or bool(self.kubernetes_selector),
            f"kubernetes_namespace {self.kubernetes_namespace!r} needs kubernetes_selector, which chooses its pods",
        )
        _require(
            re.fullmatch(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?", self.kubernetes_namespace) is not None,
            f"kubernetes_namespace {self.kubernetes_namespace!r} is not a name that a namespace can have",
        )
        names = list(self.aliases)
        _require(
            len(names) == len(self.alias), f"alias gives a name twice: {', '.join(self.alias)}; give each name once"
        )
        chained = sorted(name for name in names if self.aliases[name] in names)
        _require(not chained, f"alias {', '.join(chained)} stands for an alias; name the model itself")
        both = sorted({url.rstrip("/") for url in self.prefill} & {url.rstrip("/") for url in self.decode})
        _require(not both, f"{', '.join(both)} is listed as prefill and as decode; a node has one role")

    @property
    def aliases(self) -> dict[str, str]:
        """Names of `alias`, and what each stands for. Raises ConfigError for one that is not name=model."""
        pairs = [text.partition("=") for text in self.alias]
        for name, equals, model in pairs:
            _require(bool(name and equals and model), f"alias {name + equals + model!r} must be name=model")
        return {name: model for name, _, model in pairs}

    def _check_entry(self) -> None:
        for name in ("max_queue", "ttft_target_ms", "tpot_target_ms"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} must not be negative, got {value}")
        _require(bool(self.tls_cert) or not self.tls_key, "tls_key needs tls_cert, the certificate that it belongs to")
        for field_name in ("name", "sha256"):
            values = [getattr(key, field_name) for key in self.keys]
            twice = sorted({key.name for key in self.keys if values.count(getattr(key, field_name)) > 1})
            _require(not twice, f"keys have the same {field_name}: {', '.join(twice)}; give each its own")
