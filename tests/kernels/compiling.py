"""Kernels compiled for GPUs on a machine without one, in a process without the interpreter."""

from __future__ import annotations

import os
import sys

from tests.commands import output_of

# `report(compiled, target)`: bytes that ptxas spills.
_REPORT = """
import re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget

def report(compiled, target):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"]); file.flush()
        arch = "sm_90a" if target == 90 else f"sm_{target}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=" + arch, file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True)
    assert log.returncode == 0, log.stderr
    assert "serialized" not in log.stderr, log.stderr
    return sum(int(n) for n in re.findall(r"(\\d+) bytes spill", log.stderr))
"""


def run_compiler(code: str, *arguments: object) -> str:
    """Return what `code` prints, which may call `report`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return output_of(sys.executable, "-c", _REPORT + code, *arguments, env=environment)
