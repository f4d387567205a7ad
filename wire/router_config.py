"""Settings of a router, and of its API keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta

from kvrelay.wire.config_checks import (
    Count,
    Port,
    Positive,
    Priority,
    Share,
    Some,
    check_fields,
    is_base_url,
    is_loopback,
    require,
)
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.server_config import ServerConfig

__all__ = ["LIVE", "MAX_DRAIN_S", "POLICY_NAMES", "PRICE", "KeyConfig", "Policy", "RouterConfig"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_Limit = Annotated[int, Meta(ge=0, description="0 is no limit")]
_TargetMs = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """An API key. `kvrelay key NAME` generates one and prints the first two fields."""

    name: str
    """The owner's name, for logs, metrics and fair shares."""
    sha256: str
    """SHA-256 of the key, in hexadecimal; a plain hash is enough for a random key."""
    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    """The key's share of waiting requests, relative to other keys'."""
    priority: Priority = 0
    """Default priority of requests, and the lowest (most important) that they may ask for."""
    requests_per_minute: _Limit = 0
    """0 is no limit."""
    tokens_per_minute: _Limit = 0
    """Tokens of prompts and answers; 0 is no limit."""
    max_running: _Limit = 0
    """Requests under way at once, including waiting ones; 0 is no limit."""
    max_queue: _Limit = 0
    """Requests waiting for a node; 0 leaves only the router's limit."""
    ttft_target_ms: _TargetMs = 0.0
    """In place of the router's; 0 leaves the router's."""
    ttft_target_ms_per_token: _TargetMs = 0.0
    """In place of the router's; 0 leaves the router's."""
    tpot_target_ms: _TargetMs = 0.0
    """In place of the router's, stricter or not; 0 leaves the router's."""
    pin_share: Share = 0.25
    """Share of each node's KV that the key's requests may pin."""
    models: tuple[str, ...] = ()
    """Models and adapters that the key may use; empty allows all."""
    admin: bool = False
    """May change what the cluster serves."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a key's name must be 1 to 64 letters, digits, dots, dashes or underscores, got "
                f"{self.name[:80]!r}"
            )
        if not _HASH.fullmatch(self.sha256):
            # Perhaps it is the key itself: it is not repeated.
            raise ConfigError(
                f"sha256 of key {self.name} must be 64 hexadecimal digits in lower case, got "
                f"{len(self.sha256)} "
                "characters; `kvrelay key NAME` prints a key and its hash"
            )
        check_fields(self, f" of key {self.name}")


# How a router may choose nodes (router/policies.py).
Policy = Literal["least_queue", "prefix", "price", "round_robin", "session"]
POLICY_NAMES: tuple[Policy, ...] = get_args(Policy)
PRICE: Policy = "price"
"""Both nodes of a request are chosen at once (router/placement.py)."""
MAX_WORKERS = 256
MAX_DRAIN_S = 3600.0
LIVE = frozenset(
    {
        "prefill",
        "decode",
        "alias",
        "api_key",
        "keys",
        "max_body_bytes",
        "request_deadline_s",
        "max_queue",
        "ttft_target_ms",
        "ttft_target_ms_per_token",
        "tpot_target_ms",
        "attempts",
        "prefill_policy",
        "decode_policy",
        "strict_roles",
        "log_bodies",
    }
)
"""Settings that a running router reads again (router/router.py)."""


@dataclass(frozen=True, slots=True)
class RouterConfig(ServerConfig):
    """A router's settings: the OpenAI endpoint in front of the nodes."""

    prefill: tuple[str, ...] = ()
    """Base URLs of prefill nodes, for example http://127.0.0.1:8100."""
    decode: tuple[str, ...] = ()
    """Base URLs of decode nodes."""
    heartbeat_port: Port = 0
    """UDP port on which nodes announce themselves (their --router), signed with node_api_key; 0
    opens none.
    """
    kubernetes_selector: str = ""
    """Label selector of pods that are nodes, with a label kvrelay/role (prefill or decode); empty
    looks for no pods.
    """
    kubernetes_namespace: str = ""
    """Namespace of these pods; empty takes the router's own."""
    alias: tuple[str, ...] = ()
    """Another name for a model or adapter, name=model. Repeat it for more."""
    workers: Annotated[int, Meta(gt=0, le=MAX_WORKERS)] = 1
    """Processes that share the port, under one parent."""
    keys: tuple[KeyConfig, ...] = ()
    """More API keys, each with its name, hash, limits and share; in a file a list of mappings."""
    isolate_keys: bool = False
    """Share the KV of prompts only within one API key. Otherwise cached_tokens and first-token
    times reveal what prompts others sent.
    """
    node_api_key: str = field(default="", repr=False)
    """Sent to the nodes."""
    admin_key: str = field(default="", repr=False)
    """Key of /admin routes and the console, as `Authorization: Bearer <admin_key>`; empty keeps
    those routes closed.
    """
    drain_deadline_s: Annotated[float, Meta(gt=0, le=MAX_DRAIN_S)] = 30.0
    """Time for requests under way to finish at shutdown; an hour at most."""
    connect_deadline_s: Positive = 2.0
    """A connection to a node must be established within this time."""
    health_interval_s: Positive = 0.5
    """Time between two health checks of a node."""
    health_deadline_s: Positive = 2.0
    """A health check must be answered within this time."""
    max_queue: Count = 1000
    """Most waiting requests per model while all nodes are busy; more get 429. Divided among
    workers.
    """
    ttft_target_ms: _TargetMs = 0.0
    """Refuse requests at once, with 429, whose first token would come later; 0 refuses none.
    Clients may send x-slo-ttft-ms.
    """
    ttft_target_ms_per_token: _TargetMs = 0.0
    """Added to ttft_target_ms for each token of the prompt."""
    tpot_target_ms: _TargetMs = 0.0
    """Requests wait while one more would make a token take longer; 0 is no target. Clients may send
    a stricter x-slo-tpot-ms.
    """
    max_connections: Some = 16384
    """Most client connections at once; more get 503. Divided among workers."""
    node_ssl_certfile: str = ""
    """PEM file with the certificate for https:// nodes that ask for one (their ssl_cert_reqs)."""
    node_ssl_keyfile: str = ""
    """PEM file with its private key, if in a separate file."""
    attempts: Some = 3
    """Nodes to try for a prefill or decode request before the client gets an error."""
    prefill_policy: Policy = PRICE
    """How a prefill node is chosen: by price, or by a policy (prefix, session, least_queue,
    round_robin), with which no decode node computes a prompt that a prefill node can.
    """
    decode_policy: Policy = PRICE
    """How a decode node is chosen: one of the same policies."""
    strict_roles: bool = False
    """Decode nodes never compute a prompt that a prefill node can, and no node changes its role by
    itself.
    """
    least_prefill: Count = 0
    """Prefill nodes of each model that keep their role, whatever the load."""
    least_decode: Annotated[int, Meta(ge=1)] = 1
    """Decode nodes of each model that keep their role, whatever the load."""

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        self.check_keys("node_api_key", "admin_key")
        self._check_entry()
        require(
            not self.isolate_keys or bool(self.api_key or self.keys),
            "isolate_keys separates API keys, but there are none; set api_key or keys, too",
        )
        for url in (*self.prefill, *self.decode):
            require(
                is_base_url(url),
                f"node address {url!r} must start with http:// or https://, and name a host and "
                f"port",
            )
        require(
            not self.heartbeat_port or bool(self.node_api_key) or is_loopback(self.host),
            f"heartbeat_port on {self.host} needs node_api_key, which nodes sign with; set the "
            "same KVRELAY_NODE_API_KEY on all, or listen on 127.0.0.1",
        )
        require(
            not self.kubernetes_namespace or bool(self.kubernetes_selector),
            f"kubernetes_namespace {self.kubernetes_namespace!r} needs kubernetes_selector, which "
            f"selects its pods",
        )
        require(
            re.fullmatch(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?", self.kubernetes_namespace)
            is not None,
            f"kubernetes_namespace {self.kubernetes_namespace!r} is not a valid namespace name",
        )
        names = list(self.aliases)
        require(
            len(names) == len(self.alias),
            f"alias gives a name twice: {', '.join(self.alias)}; give each name once",
        )
        chained = sorted(name for name in names if self.aliases[name] in names)
        require(
            not chained, f"alias {', '.join(chained)} stands for an alias; name the model itself"
        )
        both = sorted(
            {url.rstrip("/") for url in self.prefill} & {url.rstrip("/") for url in self.decode}
        )
        require(
            not both, f"{', '.join(both)} is listed as prefill and as decode; a node has one role"
        )

    @property
    def aliases(self) -> dict[str, str]:
        """Return what each name of `alias` stands for. Raises ConfigError."""
        pairs = [text.partition("=") for text in self.alias]
        for name, equals, model in pairs:
            require(
                bool(name and equals and model),
                f"alias {name + equals + model!r} must be name=model",
            )
        return {name: model for name, _, model in pairs}

    def _check_entry(self) -> None:
        require(
            bool(self.node_ssl_certfile) or not self.node_ssl_keyfile,
            "node_ssl_keyfile needs node_ssl_certfile, the certificate that it belongs to",
        )
        for field_name in ("name", "sha256"):
            values = [getattr(key, field_name) for key in self.keys]
            twice = sorted(
                {key.name for key in self.keys if values.count(getattr(key, field_name)) > 1}
            )
            require(
                not twice, f"keys have the same {field_name}: {', '.join(twice)}; give each its own"
            )
