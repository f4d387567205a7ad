"""Schemathesis against the OpenAPI document of a router: no 5xx, no hang, nothing that it does not
say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import Cluster, running, tiny_model

from tests.commands import output_of

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("openapi")
    flags = tiny_model(folder, 64)
    # Every word of its tokenizer (the ids above the bytes) ends an answer: two thousand of them
    # need not be long.
    config = folder / "tiny" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"eos_token_id": list(range(256, fields["vocab_size"]))}))
    with running(folder, flags=flags) as ours:
        yield ours
        ours.all_blocks_free()


def test_what_the_document_allows_is_answered_as_it_says(cluster: Cluster, clients: Path) -> None:
    """On the router; a node asked directly answers with the same code, and its document differs in
    its title.
    """
    url = cluster.url
    command = [
        str(clients / "schemathesis"),
        "run",
        f"{url}/openapi.json",
        "--url",
        url,
        "--seed",
        "1",
    ]
    # A schema cannot say all limits (of a sum of lengths, of fields that exclude each other): a 400
    # is an answer too.
    command += ["--exclude-checks", "positive_data_acceptance"]
    command += [
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "3",
        "--request-timeout",
        "60",
    ]
    output_of(*command, cwd=cluster.folder)
    for process in [*cluster.nodes, cluster.router]:
        assert process is not None
        assert "Traceback" not in process.log.read_text()
