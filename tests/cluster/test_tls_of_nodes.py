"""Nodes that serve https alone and want the router's certificate: they announce themselves, and
requests go through.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2
import pytest

from tests.cluster.certificates import authority, signed
from tests.cluster.real_cluster import Cluster, free_port, tiny_model, wait_until

pytestmark = pytest.mark.cluster


def test_a_cluster_whose_nodes_have_tls_and_want_the_routers_certificate(tmp_path: Path) -> None:
    ca = str(authority(tmp_path) / "ca.pem")
    (cert, key), (own_cert, own_key) = signed(tmp_path, "node"), signed(tmp_path, "router")
    hears = free_port()
    flags = [*tiny_model(tmp_path), "--router", f"udp://127.0.0.1:{hears}"]
    flags += [
        "--ssl-certfile",
        cert,
        "--ssl-keyfile",
        key,
        "--ssl-ca-certs",
        ca,
        "--ssl-cert-reqs=2",
    ]
    cluster = Cluster(tmp_path, flags)
    try:
        cluster.nodes = [cluster.start(role, flags) for role in ("prefill", "decode")]
        shown = [
            "--node-ssl-certfile",
            own_cert,
            "--node-ssl-keyfile",
            own_key,
            "--ssl-ca-certs",
            ca,
        ]
        cluster.router = cluster.start(
            "router", ["--heartbeat-port", str(hears), "--strict-roles", *shown]
        )
        cluster.wait_ready(cluster.router)
        wait_until(lambda: len((cluster.router.health() or {}).get("nodes", [])) == 2, "two nodes")
        cluster.wait_up()
        asked = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 8, "ignore_eos": True}
        told = httpx2.post(f"{cluster.url}/v1/completions", json=asked, timeout=60)
        assert told.status_code == 200
        assert told.json()["usage"]["completion_tokens"] == 8
        assert cluster.router.metric("kvrelay_router_disaggregated_total") == 1
        addresses = {f"https://127.0.0.1:{node.port}" for node in cluster.nodes}
        told = httpx2.get(f"{cluster.url}/admin/nodes", headers=cluster.operator, timeout=60)
        assert {row["url"] for row in told.json()["nodes"]} == addresses
        assert httpx2.post(
            f"{cluster.url}/reset_prefix_cache", headers=cluster.operator, timeout=60
        ).json()["success"]

        stranger = ssl.create_default_context(cafile=ca)
        for address in addresses:
            with pytest.raises(httpx2.HTTPError):
                httpx2.get(f"{address}/health", verify=stranger, timeout=10)
    finally:
        cluster.stop()
