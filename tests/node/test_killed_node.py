"""What a node that was killed leaves behind on its machine, until the next one starts."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from tests.cluster.real_cluster import Cluster, tiny_model, wait_until

pytestmark = pytest.mark.cluster


def test_a_killed_node_leaves_a_folder_until_the_next_one_starts(tmp_path: Path) -> None:
    places = tmp_path / f"kvrelay-{os.geteuid()}"
    cluster = Cluster(tmp_path, tiny_model(tmp_path))
    shared_memory = set(os.listdir("/dev/shm"))

    def start() -> Path:
        """A node that is ready; its folder."""
        before = set(places.iterdir()) if places.exists() else set()
        cluster.nodes.append(cluster.start("serve", cluster.flags, env={"TMPDIR": str(tmp_path)}))
        cluster.wait_ready(cluster.nodes[-1])
        (folder,) = set(places.iterdir()) - before
        return folder

    try:
        killed, living = start(), start()
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)
        for node in cluster.nodes:
            for process in (Path("/proc", str(node.popen.pid)), *node.engines()):
                found = re.search(r"^Max open files +(\d+)", (process / "limits").read_text(), re.M)
                assert found
                assert int(found[1]) == limit
        cluster.nodes[0].kill_whole()
        assert {each.name for each in places.iterdir()} == {killed.name, living.name}
        third = start()
        assert set(places.iterdir()) == {living, third}
        assert (living / "engine").exists()
        report = cluster.nodes[1].health()
        assert report is not None
        assert report["kv_events"] is None  # without a port
        for node in cluster.nodes[1:]:
            node.popen.terminate()
            wait_until(lambda node=node: node.popen.poll() is not None, 60, "it ends")  # type: ignore[misc]
        assert list(places.iterdir()) == []
        assert {
            name for name in set(os.listdir("/dev/shm")) - shared_memory if "kvrelay" in name
        } == set()
    finally:
        cluster.stop()
