"""Fill the generated parts of all pages in, or say which pages are not current (--check: exit code
1).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.reference.pages import current

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    asks = argparse.ArgumentParser(prog="python -m scripts.reference", description=__doc__)
    asks.add_argument("--check", action="store_true", help="write nothing")
    check = asks.parse_args().check
    stale = {
        path: text
        for path, text in current(ROOT / "docs").items()
        if path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(
            f"{path.relative_to(ROOT)} "
            f"{'is not current; run: make reference' if check else 'written'}"
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
