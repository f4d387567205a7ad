"""The import rule of ARCHITECTURE.md, read from the source's own import lines (also those inside
functions).
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

_NODES = {"paged_engine", "kv_transfer", "openai_api", "wire"}
MAY_IMPORT = {
    "wire": set(),
    "kernels": set(),
    "paged_engine": {"kernels", "wire"},
    "kv_transfer": {"kernels", "wire"},
    "cache_node": {"kernels", "kv_transfer", "paged_engine", "wire"},
    "openai_api": {"wire"},
    "prefill_node": _NODES,
    "decode_node": _NODES,
    "node": {*_NODES, "cache_node", "prefill_node", "decode_node"},
    "load": {"wire"},
    "planner": {"load", "router", "wire"},
    "router": {"openai_api", "wire"},
    "kvrelay": {
        *_NODES,
        "kernels",
        "prefill_node",
        "decode_node",
        "node",
        "load",
        "planner",
        "router",
    },
}
OURS = {*MAY_IMPORT, "benchmarks", "deploy", "tests"}
HEAVY = {
    "torch",
    "triton",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
    "transformers",
    "tokenizers",
    "gguf",
    "safetensors",
    "llguidance",
}
NEVER = {
    "wire": HEAVY | {"socket", "asyncio", "aiohttp", "zmq", "time"},
    "load": HEAVY,
    "planner": HEAVY | {"socket", "asyncio", "aiohttp", "zmq", "time"},
    "router": HEAVY,
    "kvrelay": HEAVY,
    "kernels": {"transformers", "nixl", "aiohttp", "zmq", "fastapi"},
    "openai_api": {"torch", "triton", "nixl", "llguidance"},
    "paged_engine": {"transformers", "nixl", "aiohttp", "zmq", "fastapi"},
    "kv_transfer": {"transformers", "aiohttp", "fastapi"},
    "cache_node": {"transformers", "aiohttp", "fastapi"},
    "node": {"transformers"},
}


ROUTER_ORDER = (
    "background",
    "relay",
    "node_load",
    "prefix",
    "timeline",
    "reload",
    "placement",
    "nodes",
    "policies",
    "transport",
    "membership",
    "metrics",
    "request",
    "roles",
    "admission",
    "state",
    "console",
    "guard",
    "request_log",
    "router",
    "admin",
    "serve",
    "server",
    "workers",
)
"""Files and folders of router/: each imports only those before it."""


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each import that is not relative."""
    for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            for alias in statement.names:
                yield statement.lineno, f"{statement.module}.{alias.name}"


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the package of each import: a folder of ours, or a top-level name."""
    for line, name in imported(file):
        first, second = [*name.split("."), ""][:2]
        yield line, second if first == "kvrelay" and second in OURS else first


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str, repository: Path) -> None:
    forbidden = (OURS - MAY_IMPORT[package] - {package}) | NEVER.get(package, set())
    wrong = [
        f"{file.relative_to(repository)}:{line} imports {name}"
        for file in sorted((repository / package).rglob("*.py"))
        for line, name in imports(file)
        if name in forbidden
        and not (name == "torch" and file.name == "profile.py")  # measures an engine
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_inside_the_router_point_one_way(repository: Path) -> None:
    place = {name: at for at, name in enumerate(("__init__", *ROUTER_ORDER))}
    wrong = []
    for file in sorted((repository / "router").rglob("*.py")):
        part = file.relative_to(repository / "router").parts[0].removesuffix(".py")
        for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = (isinstance(statement, ast.ImportFrom) and statement.module) or ""
            other = module.removeprefix("kvrelay.router.").partition(".")[0]
            if module.startswith("kvrelay.router.") and place[other] > place[part]:
                wrong.append(f"{file.relative_to(repository)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_names_every_packaged_folder(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    packages = set(project["tool"]["setuptools"]["packages"])
    folders = {name for name in MAY_IMPORT if name != "kvrelay"}
    within = {file.parent for name in folders for file in (repository / name).glob("*/*.py")}
    named = folders | {str(folder.relative_to(repository)).replace("/", ".") for folder in within}
    named |= {
        file.parent.name
        for file in (repository / "kvrelay").glob("*/__init__.py")
        if not file.parent.is_symlink()
    }
    assert packages == {"kvrelay", *(f"kvrelay.{name}" for name in named)}


@pytest.mark.parametrize("package", [name for name in MAY_IMPORT if name != "kvrelay"])
def test_a_link_makes_the_folder_a_package_of_kvrelay(package: str, repository: Path) -> None:
    assert (repository / "kvrelay" / package).readlink() == Path("..", package)


def test_nothing_is_imported_under_a_second_name(repository: Path) -> None:
    """Tests and benchmarks, too: `router` and `kvrelay.router` would be two modules."""
    folders = {name for name in MAY_IMPORT if name != "kvrelay"}
    roots = [*MAY_IMPORT, "tests", "benchmarks", "scripts", "deploy"]
    wrong = [
        f"{file.relative_to(repository)}:{line} imports {name}"
        for root in roots
        for file in sorted((repository / root).rglob("*.py"))
        for line, name in imported(file)
        if name.partition(".")[0] in folders
    ]
    assert not wrong, "\n".join(wrong)


def test_policies_are_pure(repository: Path) -> None:
    """No socket, no clock, no random source of their own: what a policy needs is an argument."""
    impure = {"asyncio", "aiohttp", "socket", "time", "zmq", "secrets", "os", "logging"}
    file = repository / "router" / "policies.py"
    assert not [
        f"{file.name}:{line} imports {name}" for line, name in imports(file) if name in impure
    ]


def test_every_package_but_kernels_is_a_regular_one(repository: Path) -> None:
    """transformers looks for a package `kernels`, and must not find ours in a checkout."""
    assert [name for name in MAY_IMPORT if not (repository / name / "__init__.py").exists()] == [
        "kernels"
    ]
