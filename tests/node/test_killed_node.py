"""What a node leaves behind on its machine, however it ends, and how many files it may have."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from tests.cluster.real_cluster import Cluster, tiny_model, wait_until

pytestmark = pytest.mark.cluster


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvrelay" in name}


def test_a_node_that_was_killed_or_told_to_end_leaves_no_folder_and_no_shared_memory(
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    cluster = Cluster(tmp_path, tiny_model(tmp_path))
    before = shared_memory()
    try:
        killed, ended = (
            cluster.start("serve", cluster.flags, env={"TMPDIR": str(temporary)}) for _ in range(2)
        )
        cluster.nodes += [killed, ended]
        cluster.wait_ready(killed, ended)
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)
        for process in (Path("/proc", str(ended.popen.pid)), *ended.engines()):
            found = re.search(r"^Max open files +(\d+)", (process / "limits").read_text(), re.M)
            assert found
            assert int(found[1]) == limit
        killed.kill_whole()
        ended.popen.terminate()
        wait_until(lambda: ended.popen.poll() is not None, "it ends")
        assert list(temporary.iterdir()) == []
        assert shared_memory() <= before
    finally:
        cluster.stop()
