"""Ways to serve, as values and command lines: which servers, and which router in front of them.
Starts nothing.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

__all__ = ["ARMS", "MODEL_NAME", "Arm", "Kind", "Setting", "router_command", "server_command"]

MODEL_NAME = "m"


class Kind(enum.StrEnum):
    """A kind of server."""

    VLLM = "vllm"
    VLLM_KV = "vllm-kv"
    SERVE = "serve"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to serve: servers with a GPU each."""

    name: str
    servers: tuple[Kind, ...]
    router: tuple[str, ...] | None = None
    tells: bool = False


_PAIR = (Kind.PREFILL, Kind.DECODE)
ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            Arm("vllm", (Kind.VLLM,)),
            Arm("node", (Kind.SERVE,)),
            Arm("vllm-colocated", (Kind.VLLM, Kind.VLLM)),
            Arm("vllm-pair", (Kind.VLLM_KV, Kind.VLLM_KV), ()),
            Arm("colocated", (Kind.SERVE, Kind.SERVE)),
            Arm("strict", _PAIR, ("--strict-roles",)),
            Arm("cluster", _PAIR, ()),
            Arm("told", _PAIR, (), tells=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, flags and an environment that all servers of a run share."""

    model: Path
    vllm: str = "vllm"
    max_model_len: int = 16_384
    vllm_flags: tuple[str, ...] = ()
    kvrelay_flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def server_command(kind: Kind, port: int, setting: Setting, *, caching: bool) -> list[str]:
    """Name the words that start a server on the loopback. `caching`: of prefixes."""
    flags = [
        f"--served-model-name={MODEL_NAME}",
        "--load-format=dummy",
        f"--max-model-len={setting.max_model_len}",
        "--enable-prefix-caching" if caching else "--no-enable-prefix-caching",
        "--host=127.0.0.1",
        f"--port={port}",
    ]
    if kind in (Kind.VLLM, Kind.VLLM_KV):
        connector = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        own = [f"--kv-transfer-config={connector}"] if kind is Kind.VLLM_KV else []
        return [
            setting.vllm,
            "serve",
            str(setting.model),
            *flags,
            "--disable-uvicorn-access-log",
            *own,
            *setting.vllm_flags,
        ]
    return [*_kvrelay(kind), f"--model={setting.model}", *flags, *setting.kvrelay_flags]


def router_command(arm: Arm, urls: Sequence[str], port: int, told: Sequence[str] = ()) -> list[str]:
    """Name the words that start the router of an arm; the first server is its prefill node.

    `told`: flags of the targets, for an arm that tells them.
    """
    prefill, decode = urls
    return [
        *_kvrelay("router"),
        f"--prefill={prefill}",
        f"--decode={decode}",
        f"--port={port}",
        *(arm.router or ()),
        *(told if arm.tells else ()),
    ]


def _kvrelay(command: str) -> list[str]:
    return [sys.executable, "-m", "kvrelay.cli", command]
