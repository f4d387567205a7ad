"""Client libraries that people use in front of the official one, each doing one real thing through a 1P1D cluster.

They want another version of the official client than our other tests, so they live in an environment of their own
(conftest.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from real_cluster import EMBEDDED_KEY, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

KEY, MODEL = EMBEDDED_KEY, "SmolLM2-135M-Instruct"
SCRIPTS = Path(__file__).parents[1] / "clients"
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def cluster(embedded: Cluster) -> Cluster:
    return embedded


def run(clients: Path, name: str, cluster: Cluster) -> dict[str, Any]:
    """What a client's script printed last."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(clients / "python"), str(SCRIPTS / f"{name}_client.py"), cluster.url, KEY, MODEL],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_langchain_gets_an_object_and_a_stream(clients: Path, cluster: Cluster) -> None:
    found = run(clients, "langchain", cluster)
    assert 0 <= found["age"] <= 120
    assert len(found["name"]) <= 12
    assert "".join(found["chunks"]) == found["whole"] != ""
    assert len([chunk for chunk in found["chunks"] if chunk]) > 1
    assert found["usage"]["output_tokens"] == 8


def test_litellm_gets_an_answer_a_stream_and_an_error_of_its_own(clients: Path, cluster: Cluster) -> None:
    found = run(clients, "litellm", cluster)
    assert "".join(found["chunks"]) == found["whole"] != ""
    assert found["tokens"] == 8
    assert "nobody" in found["refused"]


def test_instructor_gets_objects_by_tool_and_by_schema(clients: Path, cluster: Cluster) -> None:
    found = run(clients, "instructor", cluster)
    assert len(found) == 2
    for address in found.values():
        assert len(address["street"]) <= 12
        assert 1 <= address["number"] <= 999


def test_an_agent_calls_its_tool_over_the_responses_api(clients: Path, cluster: Cluster) -> None:
    found = run(clients, "agents", cluster)
    assert found["asked"], "the agent has not called its tool"
    assert all(isinstance(a, int) and isinstance(b, int) for a, b in found["asked"])
    assert found["said"]
    assert found["hello"]
    assert found["kinds"][0] == "response.created"
    assert "response.output_text.delta" in found["kinds"]
    assert found["kinds"][-1] in ("response.completed", "response.incomplete")
