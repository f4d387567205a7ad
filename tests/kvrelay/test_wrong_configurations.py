"""What a new user may type wrongly: one line on stderr and exit code 2, and nothing is started."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from process_state import TINY

from kvrelay import cli

_MOST_BYTES = 4 << 30
ADAPTER = {"peft_type": "LORA", "r": 64, "lora_alpha": 8, "target_modules": ["q_proj"]}
EMPTY = b'{"__metadata__": {}}'

# Tried in a folder with what `place` writes there. Without a model of its own a line of an engine
# is for `tiny`. TAKEN is a port on which another process listens.
WRONG = [
    # memory and sizes
    ("up --kv-cache-memory-bytes 2T", "2 nodes together need at least 4096.00 GiB of memory"),
    ("up --config pool.yaml", "2 nodes together need at least 4096.00 GiB"),
    (
        "rank --kv-cache-memory-bytes 2T --tensor-parallel-size 2 --tensor-parallel-size-local 1"
        " --tensor-parallel-address 127.0.0.1:9",
        "the engine needs at least 2048.00 GiB",
    ),
    ("prefill --kv-cache-memory-bytes 1k", "a KV pool of 1000 bytes holds"),
    (
        "up --max-model-len 32k",
        "max_model_len 32000 is above the model's own limit of 1024; lower it",
    ),
    (
        "decode --max-model-len 1000 --kv-cache-memory-bytes 100K",
        "max_model_len 1000 does not fit: the KV pool of",
    ),
    # devices and dtypes
    ("up --device tpu", "device 'tpu' is not one of auto, cpu, cuda"),
    ("up --cpu --device cuda", "--cpu and --device cuda contradict each other"),
    ("serve --dtype fp4", "dtype 'fp4' is not one of auto, float32, bfloat16, float16"),
    ("decode --cpu --quantization fp8", "need a GPU; leave them out"),
    (
        "up --decode-tensor-parallel-size 3",
        "4 query heads cannot be shared by 3 ranks; choose a divisor of 4",
    ),
    (
        'up --override-generation-config {"temperature":"x"}',
        "temperature is of a wrong type",
    ),
    # models
    ("up --model missing", "model 'missing' does not exist; pass a folder"),
    ("prefill --model empty", "model folder empty holds no config.json"),
    ("serve --model notes.txt", "model 'notes.txt' holds no weights"),
    ("decode --model broken", "config.json cannot be read as JSON"),
    ("up --model other", "architecture 'GPT2LMHeadModel' is not supported"),
    ("serve --model wordless", "wordless holds no tokenizer.json"),
    ("serve --model part.gguf", "part.gguf is not a readable GGUF file"),
    (f"up --model {'x' * 300}", "cannot be looked up"),
    ("up --model ~nobody-of-this-name/model", "cannot be looked up"),
    # adapters and templates
    ("up --enable-lora --lora-modules a=missing", "adapter missing has no adapter_config.json"),
    ("decode --enable-lora --lora-modules missing", "lora_modules 'missing' must be name=path"),
    (
        "prefill --enable-lora --lora-modules a=adapter",
        "adapter adapter has rank 64 and max_lora_rank is 16; raise it to 64",
    ),
    (
        "up --enable-lora --lora-modules tiny=adapter --max-lora-rank 64",
        "an adapter is named 'tiny', as the model itself is",
    ),
    (
        "up --enable-lora --lora-modules a=adapter --lora-modules a=adapter",
        "lora_modules names a twice",
    ),
    ("up --chat-template missing.jinja", "the chat template missing.jinja cannot be read"),
    # the rest
    (
        "serve --port TAKEN",
        "cannot listen on 127.0.0.1 port TAKEN: Address already in use; choose another",
    ),
    ("up --port 99999", "port must be at most 65535, got 99999"),
    ("up --api-key schl\u00fcssel", "api_key must be ASCII, without line ends"),
    ("router --admin-key schl\u00fcssel", "admin_key must be ASCII, without line ends"),
    ("up --request-deadline-s nan", "request_deadline_s must be above 0.0, got nan"),
    ("up --max-body-bytes 0", "max_body_bytes must be at least 1, got 0"),
    ("up --log-dir notes.txt/logs", "cannot make log_dir"),
    ("up --max-model-length 5", "No such option: --max-model-length"),
    ("up --config missing.yaml", "cannot read config file missing.yaml"),
    (
        "router --prefill http://127.0.0.1:1",
        "a router needs at least one --prefill URL and one --decode URL",
    ),
    ("router --prefill http://127.0.0.1:1 --decode nonsense", "'nonsense'"),
    ("router --port abc", "--port must be a whole number, got 'abc'"),
    ("router --port", "--port"),
    ("up --prefill 0", "prefill must be at least 1, got 0"),
    ("decode --cluster-secret short", "must have at least 16 characters, got 5"),
    ("prefill --kv-host 10.0.0.1", "set the same KVRELAY_CLUSTER_SECRET on all nodes"),
    ("chat --key x", "No such option: --key"),
    ("chat hello", "hello"),
    ("chatt", "chatt"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    weights = len(EMPTY).to_bytes(8, "little") + EMPTY
    files: dict[str, bytes | dict[str, object]] = {
        "tiny/config.json": TINY,
        "empty/readme.md": b"",
        "broken/config.json": b"{",
        "other/config.json": {"architectures": ["GPT2LMHeadModel"]},
        "wordless/config.json": TINY,
        "wordless/model.safetensors": weights,
        "adapter/adapter_config.json": ADAPTER,
        "adapter/adapter_model.safetensors": weights,
        "notes.txt": b"",
        "part.gguf": b"GGUF",
        "pool.yaml": b"cpu: true\nkv-cache-memory-bytes: 2TiB\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else json.dumps(content).encode()
        )
    return folder


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def words_of(line: str, taken: str) -> list[str]:
    command, *words = line.replace("TAKEN", taken).split()
    if command in ("up", "prefill", "decode", "serve", "rank"):
        words += [] if "--port" in words or command == "rank" else ["--port=0"]
        words += [] if "--model" in words else ["--model=tiny", "--load-format=dummy"]
    return [command, *words]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line[:60] for line, _ in WRONG])
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    line: str,
    said: str,
    place: Path,
    taken: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.cluster._run", None)  # nothing can be started
    for module in ("kvrelay.node.server", "kvrelay.router.server", "kvrelay.node.ranks"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("KVRELAY_CLUSTER_SECRET", raising=False)
    assert cli.run(words_of(line, taken)) == 2
    shown = capsys.readouterr()
    assert said.replace("TAKEN", taken) in shown.err
    assert len(shown.err.splitlines()) == 1, shown.err
    assert shown.out == ""


def test_what_is_refused_was_not_taken(place: Path, repository: Path) -> None:
    """The command may have 4 GiB of memory, and 2 TiB are asked for."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvrelay.cli", *words_of(WRONG[0][0], "0")],
        env={**os.environ, "PYTHONPATH": str(repository), "OPENBLAS_NUM_THREADS": "1"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES)),
    )
    assert WRONG[0][1] in done.stderr
    assert (done.returncode, done.stdout) == (2, "")
