"""NIXL's own: what is said when it is not installed. What it shares with others is in test_via_each.py."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
from peer_process import CONFIG, FINGERPRINT

from kv_transfer.connector import PoolRegion
from kv_transfer.open import open_connector
from wire.errors import ConfigError


def test_missing_nixl_is_a_config_error_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    config = replace(CONFIG, kv_connector="nixl")
    with pytest.raises(ConfigError, match=r"pip install kvrelay\[node\]"):
        open_connector("x", FINGERPRINT, PoolRegion(0, 1, 4096, "cpu"), config, lambda: None)
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-")]
