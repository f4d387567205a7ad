"""The type of a JSON object."""

from __future__ import annotations

from typing import Any

__all__ = ["JsonObject"]

JsonObject = dict[str, Any]
"""An object as it is decoded, or will be encoded."""
