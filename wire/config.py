"""Configuration of engine, transfer and node: frozen, and checked once when made."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrelay.wire.config_checks import (
    Count,
    OrDefault,
    Port,
    Positive,
    Share,
    Some,
    SomeShare,
    check_fields,
    is_address,
    is_loopback,
    require,
    udp_address,
)
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import GENERATION_FIELDS, generation_values
from kvrelay.wire.server_config import ServerConfig

__all__ = [
    "CacheConfig",
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "EngineConfig",
    "NodeConfig",
    "RanksConfig",
    "Role",
    "SpeculativeConfig",
    "TransferConfig",
]

MIN_SECRET_CHARS = 16
MAX_LORA_RANK = 512
# Each proposal costs a row of a step, whether it comes true or not.
MAX_SPECULATIVE_TOKENS = 32
MAX_NGRAM = 16


class Role(enum.StrEnum):
    """A part that a node has in serving requests."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


def _named_adapter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            fields = msgspec.json.decode(text, type=dict[str, str | None])
        except msgspec.DecodeError as why:
            raise ConfigError(
                f"lora_modules {text!r} must be JSON with name and path, or name=path"
            ) from why
        name, path = fields.get("name") or "", fields.get("path") or fields.get("local_path") or ""
    require(
        bool(name and path),
        f"lora_modules {text!r} must be name=path of a folder in PEFT's layout, or JSON with name "
        f"and path",
    )
    return name, path


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """A method by which tokens are proposed, with vLLM's names."""

    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS, description="leave the config out for none")
    ] = 0
    """Most tokens that a decode step proposes per request."""
    method: Literal["ngram"] = "ngram"
    """ngram: what followed the newest tokens where they stood before. There are no draft models."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = 4
    """Longest run of newest tokens that is looked up."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = 2
    """Shortest run of newest tokens that is looked up."""

    def __post_init__(self) -> None:
        check_fields(self, " of speculative_config")
        require(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            f"prompt_lookup_min {self.prompt_lookup_min} of speculative_config is above "
            f"prompt_lookup_max {self.prompt_lookup_max}",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A model on a node."""

    model: str
    """Hugging Face folder, .gguf file, config.json (with load_format dummy), or on the Hub
    org/name, org/name@revision, org/name/file.gguf.
    """
    revision: str = ""
    """Branch, tag or commit of a model on the Hub; empty takes main."""
    hf_token: str = field(default="", repr=False)
    """For private and gated models on the Hub; better as HF_TOKEN in the environment."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto, or dummy: random weights of the right shapes."""
    generation_config: str = "auto"
    """Source of sampling defaults: auto (the model's generation_config.json), vllm (none:
    temperature 1, all tokens) or a folder with such a file, whose max_new_tokens limits every
    answer; equal on all nodes.
    """
    override_generation_config: JsonObject | None = field(
        default=None, hash=False
    )  # a dict has no hash
    """Overrides generation_config: temperature, top_p, top_k, min_p, repetition_penalty and
    max_new_tokens, the limit of any answer. For example {"temperature": 0.5}.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto (fp32 on CPU, the model's own on CUDA), float32, bfloat16 or float16."""
    max_model_len: Annotated[int, Meta(ge=0, description="0 takes the model's own")] = 0
    """Longest prompt plus answer in tokens, for example 32k; 0 takes the model's own, or what the
    KV pool has room for.
    """
    block_size: Literal[0, 16, 32, 64] = 0
    """Tokens of KV in one block, 16, 32 or 64; equal on all nodes. 0 takes 16 on CPU, 64 on CUDA.
    """
    kv_cache_memory_bytes: OrDefault = 0
    """Bytes of one rank's KV pool, for example 4GiB; 0 takes 1 GiB on CPU, on CUDA what
    gpu_memory_utilization leaves.
    """
    gpu_memory_utilization: SomeShare = 0.9
    """Share of a GPU's memory that one process may use, KV pool included."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """auto (the compute dtype) or fp8 (e4m3, a scale per token and head; CUDA only); equal on all
    nodes.
    """
    quantization: Literal["", "fp8"] = ""
    """fp8 quantizes linear layers while loading (e4m3, a scale per channel; CUDA only)."""
    max_num_batched_tokens: OrDefault = 0
    """Most prompt tokens in a step; 0 takes 128 on CPU, 8192 on CUDA."""
    max_gap_ms: Annotated[float, Meta(ge=0, description="0 takes the default")] = 0.0
    """Longest step with prompts beside decodes, in milliseconds. 0 takes 50 on CUDA; on CPU twice a
    decode step, at least 200.
    """
    max_num_seqs: OrDefault = 0
    """Most requests computed in one step; 0 takes 64 on CPU, 256 on CUDA."""
    tensor_parallel_size: Some = 1
    """Ranks that share the model, each a process with its own GPU."""
    tensor_parallel_address: str = ""
    """host:port of rank 0; may stay empty when all ranks run on this host."""
    tensor_parallel_size_local: int = 0
    """Ranks on this host; 0 for all. Start the others with `kvrelay rank`."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal prefixes."""
    batch_invariant: bool = False
    """Fixed tiles and splits, so tokens do not depend on the batch; always so on CPU."""
    speculative_config: SpeculativeConfig | None = None
    """Propose tokens found in the request's own text, with the same answer: JSON with vLLM's names,
    for example {"method": "ngram", "num_speculative_tokens": 4}.
    """
    threads: Annotated[int, Meta(ge=0, description="0 takes all cores")] = 0
    """CPU threads of the engine, at most 16 per core; 0 takes all cores it may use."""
    enable_lora: bool = False
    """Serve LoRA adapters: those of lora_modules, and others with allow_runtime_lora."""
    lora_modules: tuple[str, ...] = ()
    """A LoRA adapter, name=path of a folder in PEFT's layout; clients name it as their model.
    Repeat it for more; equal on all nodes.
    """
    max_loras: Annotated[int, Meta(ge=0, description="0 takes as many as lora_modules names")] = 0
    """Adapters loaded at once, each in a slot; 0 takes as many as lora_modules names, at least 1.
    """
    max_lora_rank: Annotated[int, Meta(gt=0, le=MAX_LORA_RANK)] = 16
    """Highest rank of an adapter; each slot takes memory for it."""
    allow_runtime_lora: bool = False
    """Serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter: clients may make the node read
    any folder on its machine.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_adapters()
        for name in self.override_generation_config or ():
            require(
                name in GENERATION_FIELDS,
                f"override_generation_config cannot set {name!r}, only "
                f"{', '.join(GENERATION_FIELDS)}",
            )
        generation_values(self.override_generation_config or {})
        in_fp8 = self.kv_cache_dtype == "fp8" or bool(self.quantization)
        require(
            not (in_fp8 and self.device == "cpu"),
            "kv_cache_dtype and quantization fp8 need a GPU; leave them out",
        )
        require(
            not (self.batch_invariant and (self.quantization or self.tensor_parallel_size > 1)),
            "batch_invariant does not work with quantization fp8 or tensor_parallel_size above 1, "
            "whose sums depend on the batch; leave one of them out",
        )
        require(
            self.tensor_parallel_size_local in range(self.tensor_parallel_size + 1),
            "tensor_parallel_size_local must be between 0 and tensor_parallel_size "
            f"({self.tensor_parallel_size}), got {self.tensor_parallel_size_local}",
        )
        require(
            bool(self.tensor_parallel_address)
            or self.tensor_parallel_size_local in (0, self.tensor_parallel_size),
            "ranks on other hosts need tensor_parallel_address, the host:port of rank 0",
        )
        require(
            not self.tensor_parallel_address or is_address(self.tensor_parallel_address),
            f"tensor_parallel_address must be host:port, got {self.tensor_parallel_address!r}",
        )

    def _check_adapters(self) -> None:
        names = [name for name, _ in self.adapters]
        for field_name in ("lora_modules", "max_loras", "allow_runtime_lora"):
            require(
                self.enable_lora or not getattr(self, field_name),
                f"{field_name} needs enable_lora, without which no adapter is served",
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        require(
            not twice,
            f"lora_modules names {', '.join(twice)} twice; give each adapter its own name",
        )
        require(
            not self.max_loras or len(names) <= self.max_loras,
            f"lora_modules names {len(names)} adapters and max_loras is {self.max_loras}; raise "
            f"it or leave it out",
        )

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Return name and path of each of `lora_modules`. Raises ConfigError."""
        return [_named_adapter(text) for text in self.lora_modules]

    @property
    def adapter_slots(self) -> int:
        return (self.max_loras or max(len(self.lora_modules), 1)) if self.enable_lora else 0

    def threads_on(self, cores: int) -> int:
        return self.threads or max(
            1, cores // (self.tensor_parallel_size_local or self.tensor_parallel_size)
        )


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """A host's ranks of a tensor-parallel engine, without rank 0."""

    engine: EngineConfig
    """Equal to rank 0's, but for tensor_parallel_size_local."""
    machine: int = 1
    """Number of this machine in the engine, each with tensor_parallel_size_local ranks; rank 0 is
    on 0.
    """

    @property
    def first(self) -> int:
        return self.machine * self.engine.tensor_parallel_size_local

    def __post_init__(self) -> None:
        size, local = self.engine.tensor_parallel_size, self.engine.tensor_parallel_size_local
        require(
            bool(self.engine.tensor_parallel_address),
            "name rank 0's host:port with tensor_parallel_address",
        )
        require(local > 0, "set tensor_parallel_size_local to the number of ranks on this host")
        require(
            0 < self.first <= size - local,
            f"machine {self.machine} begins with rank {self.first}, and its {local} ranks must be "
            f"among 1 to {size - 1}; rank 0 runs elsewhere",
        )


# The rows of openai_api/model_formats.py.
TOOL_CALL_PARSERS = (
    *("deepseek_v3", "qwen3_coder", "qwen3_xml", "mistral", "hermes", "llama3_json", "json"),
)
REASONING_PARSERS = ("mistral", "deepseek_r1", "qwen3")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """A node's side of the hand-over."""

    kv_connector: Literal["auto", "direct", "nixl", "nccl"] = "auto"
    """The connector that moves KV: direct (shared memory of one host), nixl, nccl; auto: the first
    of these that both nodes support.
    """
    kv_host: str = "127.0.0.1"
    """Address at which peers reach this node; data planes listen on its interface, or on all with
    0.0.0.0.
    """
    kv_port: Port = 0
    """Port of the control channel; 0 takes a free one."""
    cluster_secret: str = field(default="", repr=False)
    """One secret for all nodes, at least 16 characters: it encrypts control channels and signs
    tickets; better as KVRELAY_CLUSTER_SECRET in the environment. Without one, nodes hand KV over
    only within one machine.
    """
    lease_s: Positive = 5.0
    """KV is kept this long after the last heartbeat for it."""
    heartbeat_s: Positive = 1.0
    """Time between two heartbeats of a node that wants KV."""
    transfer_deadline_s: Positive = 10.0
    """A fetch may take this long, plus its size at `transfer_floor_bytes_s`."""
    transfer_floor_bytes_s: Positive = 100e6
    """Slowest transfer to wait for, in bytes per second."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """When KV does not arrive, a decode node recomputes (from the first missing block on) or fails
    the request.
    """
    kv_pull: Literal["auto", "always", "never"] = "auto"
    """Take KV of a prompt's first tokens from another node that has it cached: always, never, or
    auto, if that is faster than computing.
    """
    kv_checksums: Share = 0.0
    """Share of fetched KV blocks, 0 to 1, compared with their source by checksum; differing ones
    are not used. The source must have it above 0, too.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        # Never the secret itself in an error: it would end in a log.
        require(
            not self.cluster_secret or len(self.cluster_secret) >= MIN_SECRET_CHARS,
            f"cluster_secret must have at least {MIN_SECRET_CHARS} characters, got "
            f"{len(self.cluster_secret)}; generate "
            "one at random, for example with `openssl rand -hex 32`",
        )
        require(
            bool(self.cluster_secret) or is_loopback(self.kv_host),
            f"without cluster_secret kv_host must be a loopback address, got {self.kv_host!r}; set "
            "the same KVRELAY_CLUSTER_SECRET on all nodes",
        )
        require(
            self.lease_s >= 3 * self.heartbeat_s,
            f"lease_s must be at least three heartbeats ({3 * self.heartbeat_s:g} s), got "
            f"{self.lease_s:g}; one lost heartbeat must not lose a lease",
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A node's KV below its pool, in a process that outlives the engine."""

    kv_host_memory: Annotated[int, Meta(ge=0, description="0 takes none")] = 0
    """Bytes of this machine's memory for KV that does not fit in the pool, for example 64GiB;
    survives engine restarts. 0 takes none.
    """
    kv_store: str = ""
    """Folder or s3://BUCKET/PREFIX for KV below kv_host_memory; survives node restarts, and nodes
    may share it.
    """
    kv_store_size: Annotated[int, Meta(ge=0, description="leave it out without kv_store")] = 0
    """Most bytes in the folder, for example 1TiB, whoever wrote them; none for s3://."""
    kv_write_behind_bytes_s: Positive = 8e9
    """Most bytes per second copied from the pool to kv_host_memory, and from there to kv_store."""
    kv_pin_share: Share = 0.5
    """Share of the pool, and of kv_host_memory, that requests may pin, to be evicted last. 0 pins
    nothing.
    """
    kv_pin_s: Count = 3600
    """Longest time, in seconds, that unused KV stays pinned."""

    def __post_init__(self) -> None:
        check_fields(self)
        objects = "://" in self.kv_store
        require(
            not objects or len(self.kv_store.partition("s3://")[2].partition("/")[0]) > 2,
            f"kv_store must be a folder or s3://BUCKET/PREFIX, got {self.kv_store!r}",
        )
        require(
            not self.kv_store or bool(self.kv_host_memory),
            "kv_store needs kv_host_memory, through which its blocks pass",
        )
        require(
            bool(self.kv_store_size) == (bool(self.kv_store) and not objects),
            f"kv_store_size is {self.kv_store_size} with kv_store {self.kv_store!r}: a folder "
            "needs it (for example 100GiB); leave it out for a bucket, whose lifecycle rules "
            "delete what is old",
        )


@dataclass(frozen=True, slots=True)
class NodeConfig(ServerConfig):
    """A node: an HTTP process and an engine process."""

    engine: EngineConfig
    role: Role = Role.AGGREGATED
    transfer: TransferConfig = TransferConfig()
    cache: CacheConfig = CacheConfig()
    served_model_name: str = ""
    """Model name for clients; empty takes the model's own."""
    chat_template: str = ""
    """A Jinja file that replaces the model's chat template."""
    trust_request_chat_template: bool = False
    """Requests may bring a chat template: a Jinja program in a sandbox."""
    tool_call_parser: str = "auto"
    """Syntax of the model's tool calls: hermes (Qwen too), qwen3_coder, llama3_json, mistral,
    deepseek_v3, json; auto takes it from the chat template or the model's type, none disables
    parsing.
    """
    reasoning_parser: str = "auto"
    """Syntax of the model's reasoning: qwen3, deepseek_r1, mistral; auto as for tool_call_parser,
    none leaves it in the content.
    """
    tool_parser_plugin: str = ""
    """Python file, run at startup, that adds parsers of tool calls and reasoning."""
    start_deadline_s: Positive = 600.0
    """The engine process must be ready within this time."""
    router: tuple[str, ...] = ()
    """A router for this node's heartbeats, udp://HOST:PORT with its heartbeat_port. Repeat it for
    more.
    """

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        require(
            bool(self.ssl_cert_reqs) or not self.ssl_ca_certs,
            "ssl_ca_certs is for clients' certificates, and none are required; set ssl_cert_reqs "
            "2, too",
        )
        for router in self.router:
            host, _ = udp_address(router)
            require(
                bool(self.api_key) or is_loopback(host),
                f"router {router} is on another machine and accepts only heartbeats signed with its "
                "node_api_key; set the same KVRELAY_NODE_API_KEY on all",
            )
        require(
            not self.router or self.role is not Role.AGGREGATED,
            "router is for prefill and decode nodes: a router cannot use a node that serves alone",
        )
        require(
            not self.cache.kv_host_memory
            or (self.transfer.kv_checksums > 0 and self.engine.enable_prefix_caching),
            "kv_host_memory needs enable_prefix_caching, and kv_checksums above 0 (for example "
            "0.001), to check blocks when they come back",
        )
        for name, known in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            require(
                value in ("auto", "none", *known) or bool(self.tool_parser_plugin),
                f"{name} {value!r} is not one of auto, none, {', '.join(known)}; "
                f"tool_parser_plugin can add it",
            )

    @property
    def url(self) -> str:
        """Return where others reach this node: its host, or kv_host if it listens on all addresses."""
        everywhere = self.host in ("0.0.0.0", "::")
        return self.url_at(self.transfer.kv_host if everywhere else self.host)
