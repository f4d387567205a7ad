"""A process that is started so imports without the garbage collector, and has it back when that is
done.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvrelay.node.process import python_command

_MODULE = """
import gc
import sys

from kvrelay.node.process import freeze_imports

while_importing = gc.isenabled()


def main():
    freeze_imports()
    print(while_importing, gc.isenabled(), gc.get_freeze_count() > 1000, *sys.argv[1:])
"""


def test_the_collector_passes_over_what_was_imported(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "started_so.py").write_text(_MODULE, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(repository)])}
    command = [*python_command("started_so"), "ENDPOINT"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True", "True", "ENDPOINT"]
