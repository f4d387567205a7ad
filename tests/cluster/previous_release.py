"""The code of the release before this one, taken from the repository's own history, to run beside
this one.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["BEFORE", "as_before", "previous_release"]

# The last commit whose processes speak the version before HANDOVER.newest or LEGS.newest
# (wire/versions.py), or, as here, say nothing of their versions. Move it on with each new version.
COMMIT = "323033705418c48688a4d16d8c977f946dd32749"
_DEADLINE_S = 60.0
BEFORE = {
    "--max-running": "--max-num-seqs",
    "--max-batched-tokens": "--max-num-batched-tokens",
    "--tensor-parallel": "--tensor-parallel-size",
    "--tensor-parallel-local": "--tensor-parallel-size-local",
    "--block-tokens": "--block-size",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
    "--prefix-cache": "--enable-prefix-caching",
}
"""Flags of that release, and their names now."""


def previous_release(folder: Path) -> Path | None:
    """Its code, under `folder`; None where the history is not to be had (a shallow clone, an
    archive).
    """
    root = Path(__file__).parents[2]
    try:
        archive = ["git", "-C", str(root), "archive", "--format=tar", COMMIT, ":!tests"]
        packed = subprocess.run(
            archive, capture_output=True, check=True, timeout=_DEADLINE_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder


def as_before(flags: Sequence[str]) -> list[str]:
    """Give flags the names that they had in that release."""
    names = {now: before for before, now in BEFORE.items()}
    return [names.get(flag, flag) for flag in flags]
