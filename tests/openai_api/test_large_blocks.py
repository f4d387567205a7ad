"""Memory of long bodies goes back to the system."""

import subprocess
import sys

import pytest

BODIES = """
import os, sys
from kvrelay.openai_api.json_body import return_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "given back":
    return_large_blocks()
before = resident()
b"x" * (30 << 20)  # from now on glibc keeps what is smaller
bodies = []
for _ in range(8):
    bodies += b"x" * (8 << 20), b"x" * 100_000  # the small one stays behind it
bodies = bodies[1::2]
print((resident() - before) >> 20)
"""


@pytest.mark.parametrize(("how", "left_mib"), [("given back", range(8)), ("kept", range(30, 80))])
def test_the_memory_of_a_freed_body_goes_back_to_the_system(how: str, left_mib: range) -> None:
    told = subprocess.run(
        [sys.executable, "-c", BODIES, how], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) in left_mib
