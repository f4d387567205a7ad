"""`python -m kvrelay.monitoring FOLDER`: write the files of deploy/monitoring."""

from __future__ import annotations

import sys
from pathlib import Path

from kvrelay.monitoring.files import write


def main() -> int:
    """Exit code 2 without a folder."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m kvrelay.monitoring FOLDER\n")
        return 2
    for path in write(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
