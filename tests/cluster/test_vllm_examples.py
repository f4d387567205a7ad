"""Examples of vLLM's documentation against our processes: address, key and model name changed,
nothing else.

They are vLLM's, so they are not here: the variable VLLM_EXAMPLES names the folder that has them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_model import held_model
from real_cluster import running

from kvrelay.machine import embedded_model

EXAMPLES = Path(os.environ.get("VLLM_EXAMPLES", "."))
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.skipif(
        "VLLM_EXAMPLES" not in os.environ,
        reason="VLLM_EXAMPLES names no folder with vLLM's examples",
    ),
]

KEY, MODEL = "of-the-examples", "SmolLM2-135M-Instruct"
DEADLINE_S = 240.0
WEATHER = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
CALLS = {"get_current_weather": WEATHER, "get_weather": {"latitude": 48.9, "longitude": 2.4}}
PLUGIN = """
from kvrelay.openai_api.model_formats import REASONING_FORMATS, ReasoningFormat

# The embedded model does not reason: its first sentence is taken for a thought.
REASONING_FORMATS["first_sentence"] = ReasoningFormat(openers=(), closers=(".",), assumed=True)
"""
SAMPLING = {
    "temperature": 0,
    "repetition_penalty": 1.2,
    "max_new_tokens": 200,
}  # so small a model ends no number else


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the embedded model by 1P1D; yields its URL. The examples set no limit, so the nodes do."""
    flags = [
        "--model",
        str(embedded_model()),
        "--cpu",
        "--threads",
        "1",
        "--kv-cache-memory-bytes",
        str(256 << 20),
    ]
    flags += ["--override-generation-config", json.dumps(SAMPLING)]
    folder, router_flags = tmp_path_factory.mktemp("examples"), ["--api-key", KEY]
    (folder / "plugin.py").write_text(PLUGIN)
    flags += [
        "--tool-parser-plugin",
        str(folder / "plugin.py"),
        "--reasoning-parser",
        "first_sentence",
    ]
    with running(folder, prefill=1, decode=1, flags=flags, router_flags=router_flags) as ours:
        yield ours.url
        ours.all_blocks_free()


@pytest.fixture(scope="module")
def calling(router: str) -> Iterator[str]:
    """Serve a router whose model calls the tools that a request leaves to it."""
    with held_model(router, CALLS) as url:
        yield url


def copied(name: str, folder: Path, changes: dict[str, str]) -> Path:
    """Copy an example with each of these patterns replaced."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"{name} has no {pattern}"
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def run(name: str, clients: Path, folder: Path, url: str, *flags: str) -> str:
    """Return what an example printed that asked there."""
    changes = {"http://localhost:8000": url, '"(EMPTY|empty)"': f'"{KEY}"'}
    if '"Qwen/' in (EXAMPLES / name).read_text(
        encoding="utf-8"
    ):  # the others ask for the first model that is served
        changes['"Qwen/[^"]*"'] = f'"{MODEL}"'
    script = copied(name, folder, changes)
    (folder / "utils.py").write_bytes((EXAMPLES / "utils.py").read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(clients / "python"), str(script), *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment | {"ROUTER": url, "KEY": KEY},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "flags", "patterns"),
    [
        ("openai_chat_completion_client", "", [r"ChatCompletion\(.*finish_reason='(stop|length)'"]),
        ("openai_chat_completion_client", "--stream", ["(?s)(ChatCompletionChunk.*){4}"]),
        ("openai_completion_client", "", [r"top_logprobs=\[\{", "index=0", "index=1"]),
        ("openai_completion_client", "--stream", [r"top_logprobs=\[\{", "index=0", "index=1"]),
        ("openai_responses_client", "", [r"\S"]),
        ("openai_responses_client_with_tools", "", [r"^Function call: get_weather \{.*\n"]),
        (
            "openai_chat_completion_client_with_tools_required",
            "",
            [
                "(?s)(ChoiceDeltaToolCall.*){2}",
                "ToolCall\\(.*name='get_(current_weather|forecast)'",
            ],
        ),
        (
            "openai_chat_completion_with_reasoning",
            "",
            ["reasoning for Round 1: [^.\n]+\n", "content for Round 2: "],
        ),
        (
            "openai_chat_completion_with_reasoning_streaming",
            "",
            [r"\nreasoning:[^.]+\ncontent:."],
        ),
    ],
)
def test_an_example_prints_what_it_shows(
    name: str, flags: str, patterns: list[str], clients: Path, tmp_path: Path, router: str
) -> None:
    said = run(f"{name}.py", clients, tmp_path, router, *flags.split())
    assert all(re.search(pattern, said) for pattern in patterns), said[-3000:]


def test_chosen_tools(clients: Path, tmp_path: Path, calling: str) -> None:
    said = run("openai_chat_completion_client_with_tools.py", clients, tmp_path, calling)
    assert "streamed tool call name: get_current_weather\n" in said
    assert f"streamed tool call arguments: {json.dumps(WEATHER)}\n" in said
    assert "tool_to_call result:  The weather in Dallas" in said
    assert "ChatCompletion(" in said.split("Chat completion2 results:")[1]


def test_tools_behind_reasoning(clients: Path, tmp_path: Path, calling: str) -> None:
    said = run("openai_chat_completion_tool_calls_with_reasoning.py", clients, tmp_path, calling)
    assert len(re.findall(r"^reasoning: (?!None$)[^.\n]+$", said, re.MULTILINE)) == 4
    assert said.count("function name: get_current_weather\n") == 4
    assert (
        said.count(f"function arguments: {json.dumps(WEATHER)}\n") == 2
    )  # the others are calls by name
    assert len(set(re.findall("function arguments: (.*)", said))) <= 2
