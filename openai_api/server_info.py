"""What GET /server_info tells of a process, at the router and at a node: its configuration, without
secrets, and where it runs. The names of its fields are vLLM's.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from typing import Any

import msgspec

from kvrelay.wire.errors import RequestError

__all__ = ["server_info"]

_FORMATS = ("text", "json")
_PREFIXES = ("KVRELAY_", "VLLM_")
_SECRET = ("KEY", "SECRET", "TOKEN")
"""Variables with such a word in their names are not told."""
_PACKAGES = ("kvrelay", "torch", "triton", "transformers", "fastapi", "uvicorn")


def server_info(config: Any, config_format: str) -> dict[str, Any]:
    """Tell of a process with this configuration, a dataclass, as text or JSON. Raises RequestError.

    Fields that are left out of a configuration's repr are secrets, and left out here."""
    if config_format not in _FORMATS:
        raise RequestError(
            f"config_format must be {' or '.join(_FORMATS)}, got {config_format[:40]!r}",
            param="config_format",
        )
    return {
        "vllm_config": str(config) if config_format == "text" else _told(config),
        "vllm_env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)
        },
        "system_env": {
            "os": platform.platform(),
            "libc_version": "-".join(platform.libc_ver()),
            "python_version": platform.python_version(),
            "cpu_count": os.cpu_count(),
            **{f"{name}_version": _version(name) for name in _PACKAGES},
        },
    }


def _told(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            each.name: _told(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.repr
        }
    return (
        [_told(item) for item in value] if isinstance(value, tuple) else msgspec.to_builtins(value)
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
