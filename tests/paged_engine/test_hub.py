"""Models from the Hub: what is downloaded, what is not, what breaks, and what each error says. Over
real HTTP.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.utils
import pytest
from fake_hub import FakeHub, Repository, fake_hub
from tiny_models import make_tiny

from kvrelay.paged_engine.before_loading import check_engine
from kvrelay.paged_engine.hub import resolve_model
from kvrelay.paged_engine.model_files import read_model_config, read_tensors
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError
from tests.commands import output_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model, one shard, with all that repositories of the field hold beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("Qwen3ForCausalLM", folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    beside = {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hello",
        "generation_config.json": b'{"eos_token_id": 2}',
    }
    never = dict.fromkeys(
        ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md"), b"x"
    )
    return files | beside | never


@pytest.fixture(scope="module")
def sharded(tiny: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same model in shards."""
    folder = tmp_path_factory.mktemp("sharded")
    make_tiny("Qwen3ForCausalLM", folder / "whole").save_pretrained(
        folder / "shards", max_shard_size="150KB"
    )
    shards = {file.name: file.read_bytes() for file in (folder / "shards").iterdir()}
    return {name: content for name, content in tiny.items() if name != "model.safetensors"} | shards


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub of our own for this process, with an empty cache in tmp_path."""
    with fake_hub() as server:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        huggingface_hub.utils.enable_progress_bars()


def resolve(model: str, **given: Any) -> Path:
    """Where the model of that engine is."""
    return resolve_model(EngineConfig(model, **given), check_engine)


def refused(model: str, **given: Any) -> str:
    """The message with which a model is refused: one line."""
    with pytest.raises(ConfigError) as caught:
        resolve(model, **given)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- what is downloaded


def test_a_model_is_downloaded_and_can_be_read(hub: FakeHub, tiny: dict[str, bytes]) -> None:
    hub.repositories["org/Tiny-1B"] = Repository(tiny)
    folder = resolve("org/Tiny-1B")
    assert set(hub.downloaded()) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert {file.name: file.read_bytes() for file in folder.iterdir()}.items() <= tiny.items()
    config = read_model_config(str(folder))
    assert config.name == "Tiny-1B"
    assert len(list(read_tensors(str(folder), config))) > 20


def test_of_a_sharded_model_the_shards_of_its_index_are_downloaded(
    hub: FakeHub, sharded: dict[str, bytes]
) -> None:
    other = {"model-00001-of-00099.safetensors": b"of another index"}
    hub.repositories["org/sharded"] = Repository(sharded | other)
    folder = resolve("org/sharded")
    weights = {file for file in hub.downloaded() if file.endswith(".safetensors")}
    assert len(weights) > 2
    assert weights == {name for name in sharded if name.startswith("model-")}
    assert len(list(read_tensors(str(folder), read_model_config(str(folder))))) > 20


def test_without_weights_only_config_and_tokenizer_are_downloaded(
    hub: FakeHub, tiny: dict[str, bytes]
) -> None:
    hub.repositories["org/tiny"] = Repository(tiny)
    folder = resolve("org/tiny", load_format="dummy")
    assert not any(name.endswith(".safetensors") for name in hub.downloaded())
    assert dict(read_tensors(str(folder), read_model_config(str(folder), "dummy"), "dummy"))
    assert resolve("org/tiny") == folder
    assert "model.safetensors" in hub.downloaded()


def test_one_gguf_file_is_downloaded_alone(hub: FakeHub) -> None:
    files = {
        "a.Q4_K_M.gguf": b"GGUF four",
        "sub/b.Q8_0.gguf": b"GGUF eight",
        "model.safetensors": b"x",
    }
    hub.repositories["org/tiny-GGUF"] = Repository(files, {"v2": {"a.Q4_K_M.gguf": b"GGUF new"}})
    path = resolve("org/tiny-GGUF/a.Q4_K_M.gguf")
    assert (path.name, path.suffix, path.read_bytes()) == ("a.Q4_K_M.gguf", ".gguf", b"GGUF four")
    assert resolve("org/tiny-GGUF/sub/b.Q8_0.gguf").read_bytes() == b"GGUF eight"
    assert resolve("org/tiny-GGUF/a.Q4_K_M.gguf@v2").read_bytes() == b"GGUF new"
    assert len(hub.downloaded()) == 3
    assert (
        "holds no c.gguf; it holds GGUF files, for example --model org/tiny-GGUF/a.Q4"
        in refused("org/tiny-GGUF/c.gguf")
    )


def test_a_revision_stands_behind_the_id_or_in_its_own_setting(
    hub: FakeHub, tiny: dict[str, bytes]
) -> None:
    hub.repositories["org/tiny"] = Repository(
        tiny, {"v2": tiny | {"tokenizer.json": b'{"v": 2}'}, "pr/1": tiny}
    )
    main, second = resolve("org/tiny"), resolve("org/tiny@v2")
    assert main != second
    assert (second / "tokenizer.json").read_bytes() == b'{"v": 2}'
    assert resolve("org/tiny", revision="v2") == second
    assert resolve("org/tiny@v2", revision="v2") == second
    assert resolve(f"org/tiny@{second.name}") == second
    assert resolve("org/tiny@pr/1").exists()
    assert "name two revisions" in refused("org/tiny@v2", revision="main")
    assert refused("org/tiny@v3") == "org/tiny on the Hub has no revision 'v3'"


def test_a_token_is_sent_from_the_argument_or_from_the_environment(
    hub: FakeHub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/private"] = Repository(tiny, token="secret")
    assert (
        "no folder 'org/private' here and no such model on the Hub; if it is private, give a token"
        in refused("org/private")
    )
    assert resolve("org/private", hf_token="secret").exists()
    shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve("org/private").exists()


# --- what is on this machine already


def test_a_path_is_left_as_it_is_and_the_hub_is_not_asked(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub.broken = 500
    assert resolve("org/tiny") == Path("org/tiny")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("~/org/tiny") == tmp_path / "org" / "tiny"
    for missing in (
        "./org/other",
        "org/tiny/sub",
        "/nowhere",
        "name",
        "~/x",
        "org/tiny/x.bin",
        "../org",
        ".org/x",
    ):
        assert refused(missing).startswith(f"model {missing!r} does not exist; pass a folder")
    assert hub.asked == []


def test_a_path_costs_no_import() -> None:
    code = (
        "import sys; from kvrelay.paged_engine.hub import resolve_model; from kvrelay.wire.config "
        "import EngineConfig; resolve_model(EngineConfig('.'), id); assert not "
        "{'huggingface_hub', 'torch'} & set(sys.modules)"
    )
    output_of(sys.executable, "-c", code, cwd=Path(__file__).parents[2])


def test_what_is_cached_is_not_downloaded_again_and_works_without_network(
    hub: FakeHub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/tiny"] = Repository(sharded)
    hub.repositories["org/gguf"] = Repository({"a.gguf": b"GGUF"})
    folder, file = resolve("org/tiny"), resolve("org/gguf/a.gguf")
    hub.asked.clear()

    def all_is_there() -> None:
        assert resolve("org/tiny") == folder
        assert resolve(f"org/tiny@{folder.name}") == folder
        assert resolve("org/gguf/a.gguf") == file
        assert hub.downloaded() == []

    all_is_there()
    hub.broken = 503
    all_is_there()
    hub.broken = 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    all_is_there()
    assert "HF_HUB_OFFLINE forbids" in refused("org/other")
    assert "HF_HUB_OFFLINE forbids" in refused("org/gguf/b.gguf")
    next(folder.glob("*.safetensors")).unlink()
    assert "org/tiny is not, or not wholly, in the cache" in refused("org/tiny")


# --- what breaks


def test_errors_of_the_hub_are_told_in_one_sentence(hub: FakeHub, tiny: dict[str, bytes]) -> None:
    hub.repositories["org/tiny"] = Repository(tiny)
    hub.repositories["org/gated"] = Repository(tiny, gated=True, token="secret")
    assert "no folder 'org/missing' here and no such model on the Hub" in refused("org/missing")
    gated = refused("org/gated")
    assert "org/gated is gated; accept its terms on https://huggingface.co/org/gated" in gated
    assert "--hf-token or in HF_TOKEN" in gated
    assert resolve("org/gated", hf_token="secret").exists()
    assert "does not accept the token" in refused("org/tiny", hf_token="broken-token")
    assert "neither a path that exists nor a Hub id" in refused("org/a--b")
    hub.broken = 500
    assert "the Hub cannot be reached" in refused("org/tiny")


def test_what_cannot_be_served_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, tiny: dict[str, bytes]
) -> None:
    def refused_with(changes: dict[str, bytes | None]) -> str:
        files = {name: content for name, content in (tiny | changes).items() if content is not None}
        hub.repositories["org/tiny"] = Repository(files)
        return refused("org/tiny")

    only_bin = refused_with({"model.safetensors": None, "consolidated.safetensors": None})
    assert "holds no model.safetensors; it holds pickled weights, which are programs" in only_bin
    gguf = refused_with({"config.json": None, "tiny.Q4.gguf": b""})
    assert (
        "holds no config.json; it holds GGUF files, for example --model org/tiny/tiny.Q4.gguf"
        in gguf
    )
    assert "holds no tokenizer.json" in refused_with({"tokenizer.json": None})
    unknown = json.loads(tiny["config.json"]) | {"architectures": ["OddForCausalLM"]}
    assert "architecture 'OddForCausalLM' is not supported" in refused_with(
        {"config.json": json.dumps(unknown).encode()}
    )
    assert "not a readable safetensors index" in refused_with(
        {"model.safetensors.index.json": b"{}"}
    )
    bins = json.dumps({"weight_map": {"a": "pytorch_model.bin"}}).encode()
    assert "files that are no safetensors: pytorch_model.bin" in refused_with(
        {"model.safetensors.index.json": bins}
    )
    lost = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    assert "holds no model-1.safetensors" in refused_with({"model.safetensors.index.json": lost})
    assert not any(name.endswith((".safetensors", ".bin", ".gguf")) for name in hub.downloaded())


def test_settings_that_do_not_fit_are_refused_before_the_download(
    hub: FakeHub, tiny: dict[str, bytes]
) -> None:
    hub.repositories["org/tiny"] = Repository(tiny)
    hub.repositories["org/gguf"] = Repository({"a.Q4.gguf": b"GGUF", "config.json": b"{}"})
    for model, settings, message in (
        ("org/tiny", {"max_model_len": 1000}, "1000 is above the model's own limit of 512; lower"),
        ("org/gguf", {}, "for example --model org/gguf/a.Q4.gguf"),
    ):
        assert message in refused(model, **settings)
    assert not any(name.endswith((".gguf", ".safetensors")) for name in hub.downloaded())


def test_a_full_disk_is_told(
    hub: FakeHub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "is full; make room, or set HF_HOME to a larger one" in refused("org/tiny")


# --- what is seen meanwhile
