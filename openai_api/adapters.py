"""Requests that load and unload LoRA adapters, under the names that vLLM has given them, and their
answers.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

__all__ = ["AdapterAnswer", "NodeSaid", "LoadAdapterRequest", "UnloadAdapterRequest"]


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    """POST /v1/load_lora_adapter: a folder on each node's machine. `load_inplace`: it may replace
    its namesake.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class NodeSaid(msgspec.Struct, frozen=True):
    """What one node has said."""

    url: str
    role: str
    status: int
    message: str


class AdapterAnswer(msgspec.Struct, frozen=True):
    """What has happened to an adapter. `nodes`: a router's only."""

    lora_name: str
    message: str
    nodes: list[NodeSaid] | UnsetType = UNSET
