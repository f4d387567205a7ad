"""Client libraries that people use, each doing what its users do through a 1P1D cluster: URL and
model changed alone. The model is tiny, with the words and the chat template of the embedded one.

Most want another version of the official client than our other tests, so they live in environments
of their own (conftest.py). The table in docs/guides/clients.md names those that run here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from held_model import held_model
from real_cluster import running, tiny_model

from kvrelay.machine import embedded_model
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from tests.commands import output_of

pytestmark = [pytest.mark.cluster, pytest.mark.model]

KEY, MODEL = "token-abc123", "tiny"
SCRIPTS = Path(__file__).parents[1] / "clients"
NUMBERS = {"a": 2, "b": 3}
COMPLETE = [
    "anthropic",
    "langchain",
    "litellm",
    "llama_index",
    "llm",
    "openai",
    "our openai",
    "pydantic_ai",
]
COMPLETE += ["npm ai", "npm openai"]
"""The clients that show all that is common: an answer, a stream, a tool call, an object and an
error.
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a router whose model calls `add` wherever a request leaves it to the model."""
    folder = tmp_path_factory.mktemp("clients")
    flags = tiny_model(folder, 512)
    words, model = load_tokenizer(str(embedded_model())), folder / "tiny"
    words.backend.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(words.chat_template)
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": words.vocab_size, "eos_token_id": words.eos_token_ids}
    (model / "config.json").write_text(json.dumps(config))
    with (
        running(folder, flags=flags, router_flags=["--api-key", KEY]) as cluster,
        held_model(cluster.url, {"add": NUMBERS}) as url,
    ):
        yield url


def run(request: pytest.FixtureRequest, name: str, url: str) -> dict[str, Any]:
    """Return what a client's script printed last. Our own environment has the newest of OpenAI's
    and Anthropic's.
    """
    kind, _, script = name.rpartition(" ")
    if kind == "npm":
        command = [request.getfixturevalue("node_clients"), str(SCRIPTS / f"{script}_client.mjs")]
    else:
        ours = kind == "our" or script == "anthropic"
        python = sys.executable if ours else str(request.getfixturevalue("clients") / "python")
        command = [python, str(SCRIPTS / f"{script}_client.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = output_of(*command, url, KEY, MODEL, env=environment)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def is_person(found: Any) -> bool:
    return set(found) == {"name", "age"} and len(found["name"]) <= 12 and 0 <= found["age"] <= 120


@pytest.mark.parametrize("name", COMPLETE)
def test_a_client_gets_answers_streams_calls_objects_and_errors(
    name: str, request: pytest.FixtureRequest, url: str
) -> None:
    found = run(request, name, url)
    assert "".join(found["chunks"]) == found["whole"] != ""
    assert len([chunk for chunk in found["chunks"] if chunk]) > 1
    assert found["tokens"] == 8
    assert found["called"] == ["add", NUMBERS]
    assert is_person(found["object"])
    assert "nobody" in found["refused"]
    # What only some can do.
    if "kinds" in found:
        assert_is_response(found["kinds"])
        assert found["said"]
    if name == "anthropic":
        assert found["models"] == [MODEL]
        assert found["counted"]
    if name == "npm ai":
        assert found["steps"] == 2  # the call, and what the model made of its result


def assert_is_response(kinds: list[str]) -> None:
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert kinds[-1] == "response.completed"


def test_instructor_gets_objects_by_tool_and_by_schema(
    request: pytest.FixtureRequest, url: str
) -> None:
    found = run(request, "instructor", url)
    assert len(found) == 2
    assert all(map(is_person, found.values()))


def test_an_agent_calls_its_tool_over_the_responses_api(
    request: pytest.FixtureRequest, url: str
) -> None:
    found = run(request, "agents", url)
    assert found["asked"] == [["add", NUMBERS]]
    assert found["said"]
    assert found["hello"]
    assert_is_response(found["kinds"])
