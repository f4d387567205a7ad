"""Loading and unloading LoRA adapters at run time, the HTTP process's half: from a body to what
clients may name.

An adapter that is unloaded is unknown at once; the engine frees its slot when the requests that it
has are done.
"""

from __future__ import annotations

import uuid
from typing import TypeVar

import msgspec

from kvrelay.node.engine_client import EngineClient
from kvrelay.node.serving import Serving
from kvrelay.openai_api.types import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.engine_messages import AdapterRefused, LoadAdapter, UnloadAdapter
from kvrelay.wire.errors import NotFound, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = ["load_adapter", "unload_adapter"]

# Reading an adapter takes seconds; this is for a file system that hangs.
ANSWER_DEADLINE_S = 300.0
MAX_NAME_CHARS = 256

_Body = TypeVar("_Body", bound=msgspec.Struct)


async def load_adapter(
    config: NodeConfig, engine: EngineClient, serving: Serving, body: bytes
) -> AdapterAnswer:
    """Make an adapter known. Raises RequestError, NotFound if it has no files, EngineDead,
    DeadlineExceeded.
    """
    _check_allowed(config, "/v1/load_lora_adapter")
    asked = _decoded(body, LoadAdapterRequest)
    if not asked.lora_name or not asked.lora_path:
        raise RequestError("lora_name and lora_path must not be empty", param="lora_path")
    if len(asked.lora_name) > MAX_NAME_CHARS or not asked.lora_name.isprintable():
        raise RequestError(
            f"lora_name must be printable and have at most {MAX_NAME_CHARS} characters, got "
            f"{len(asked.lora_name)}",
            param="lora_name",
        )
    if asked.lora_name == serving.model_name:
        raise RequestError(
            f"{asked.lora_name!r} is the name of the model itself; choose another",
            param="lora_name",
        )
    answer = await engine.load_adapter(
        LoadAdapter(uuid.uuid4().hex, asked.lora_name, asked.lora_path, asked.load_inplace),
        ANSWER_DEADLINE_S,
    )
    if isinstance(answer, AdapterRefused):
        if answer.missing:
            raise NotFound(
                f"{answer.reason} (there is no folder {asked.lora_path!r} on this node)",
                param="lora_path",
            )
        raise RequestError(answer.reason, param="lora_name")
    serving.adapters[asked.lora_name] = answer.adapter
    return AdapterAnswer(
        asked.lora_name,
        f"adapter {asked.lora_name!r} is loaded, content {answer.adapter.digest[:12]}",
    )


def unload_adapter(
    config: NodeConfig, engine: EngineClient, serving: Serving, body: bytes
) -> AdapterAnswer:
    """Make an adapter unknown. Raises RequestError, NotFound if it is."""
    _check_allowed(config, "/v1/unload_lora_adapter")
    name = _decoded(body, UnloadAdapterRequest).lora_name
    if serving.adapters.pop(name, None) is None:
        raise NotFound(
            f"adapter {name!r} is not loaded here", param="lora_name", code="model_not_found"
        )
    engine.unload_adapter(UnloadAdapter(name))
    return AdapterAnswer(
        name, f"adapter {name!r} is unloaded; its slot is free when its last request is done"
    )


def _check_allowed(config: NodeConfig, path: str) -> None:
    if not config.engine.allow_runtime_lora:
        raise NotFound(
            f"there is no route {path} here; a node that is started with --enable-lora "
            f"--allow-runtime-lora has it"
        )


def _decoded(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as why:
        fields = " and ".join(name for name in kind.__struct_fields__ if name.startswith("lora_"))
        raise RequestError(f"the body must be a JSON object with {fields}: {why}") from why
