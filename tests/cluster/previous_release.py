"""The code of the release before this one, taken from the repository's own history, to run beside
this one.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

__all__ = ["code_of", "previous_release"]

# The last commit that spoke one version more than HANDOVER or LEGS (wire/versions.py) have now.
# Move it on with each new version.
COMMIT = "e192260d4f85a438c3253b950d9a58fd6eb93f1c"
_DEADLINE_S = 60.0


def previous_release(folder: Path) -> Path | None:
    """Its code, under `folder`; None where the history is not to be had (a shallow clone, an
    archive).
    """
    try:
        return code_of(COMMIT, folder)
    except (OSError, subprocess.SubprocessError):
        return None


def code_of(commit: str, folder: Path) -> Path:
    """Unpack the code of a commit, without tests, into a folder."""
    root = Path(__file__).parents[2]
    archive = ["git", "-C", str(root), "archive", "--format=tar", commit, ":!tests"]
    packed = subprocess.run(archive, capture_output=True, check=True, timeout=_DEADLINE_S).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder
