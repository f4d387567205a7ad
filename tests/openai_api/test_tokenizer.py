"""Tokenizers of every kind of model: the embedded GGUF, other GGUF kinds, folders, and models
without one.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from kvrelay.openai_api.tokenizer import BYTE_CHARS, Tokenizer
from kvrelay.openai_api.tokenizer_files import byte_tokenizer, load_tokenizer
from kvrelay.wire.errors import ConfigError

TEXTS = [
    "",
    "Hello world",
    "In 2024, 12345 + 67890 = 80235.",
    "def f(x):\n\treturn x**2  # ok\n\n\n    pass\r\n",
    "日本語のテキスト 한국어 العربية 😀👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "   lead, trail   ",
    "I'm sure we'll DON'T they've",
    "\u200b\ufeff\x00\x7f weird",
]


# The embedded model


@pytest.fixture(scope="module")
def theirs(embedded_gguf: Path) -> Any:
    """transformers' reading of the same file; takes 6 s."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(embedded_gguf.parent), gguf_file=embedded_gguf.name)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_model_is_tokenized_as_by_transformers(
    smollm2: Tokenizer, theirs: Any, text: str
) -> None:
    ids = smollm2.encode(text, True)
    assert ids == theirs(text)["input_ids"]
    assert smollm2.decode(ids, skip_special_tokens=False) == text == theirs.decode(ids)
    assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.model
def test_the_embedded_model_loads_fast_and_knows_its_special_tokens(embedded_gguf: Path) -> None:
    began = time.process_time()
    tokenizer = load_tokenizer(str(embedded_gguf))
    assert time.process_time() - began < 1.5
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.special_ids == frozenset(range(17))
    assert "<|im_start|>" in (tokenizer.chat_template or "")
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_bytes(49152) == tokenizer.token_bytes(-1) == b""


# Other GGUF files


def write_gguf(path: Path, model: str, tokens: list[str], **fields: Any) -> str:
    """A GGUF file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def byte_level_gguf(path: Path, pre: str, **fields: Any) -> Tokenizer:
    """All bytes, a few merges, and two control tokens with ids 261 and 262."""
    merges = ["1 2", "12 3", "a b", "ab c", "Ġ a"]
    tokens = [*BYTE_CHARS, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>"]
    types = [1] * 261 + [3, 3]
    fields = {"tokenizer_pre": pre, "token_types": types, "token_merges": merges, **fields}
    fields |= {"bos_token_id": 261, "eos_token_id": 262}
    return load_tokenizer(write_gguf(path, "gpt2", tokens, **fields))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, False)]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "1", "2"]),
        ("qwen2", ["1", "2", "3", "1", "2"]),
        ("llama-bpe", ["123", "12"]),
        ("gpt-2", ["123", "12"]),
        ("default", ["123", "12"]),
    ],
)
def test_the_named_pre_tokenizer_is_used(tmp_path: Path, pre: str, digits: list[str]) -> None:
    tokenizer = byte_level_gguf(tmp_path / "m.gguf", pre)
    assert words(tokenizer, "12312") == digits
    assert words(tokenizer, "abc ab</s>") == ["abc", " ", "ab", "</s>"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, False)) == text.replace(
            "e\u0301", "é" if pre == "qwen2" else "e\u0301"
        )


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    assert byte_level_gguf(tmp_path / "a.gguf", "gpt-2").encode("a", True) == [97]
    assert byte_level_gguf(tmp_path / "b.gguf", "llama-bpe").encode("a", True) == [261, 97]
    assert byte_level_gguf(tmp_path / "c.gguf", "llama-bpe", add_bos_token=False).encode(
        "a", True
    ) == [97]
    both = byte_level_gguf(tmp_path / "d.gguf", "gpt-2", add_bos_token=True, add_eos_token=True)
    assert both.encode("a", True) == [261, 97, 262]
    assert both.encode("a", False) == [97]


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("gpt2", {"tokenizer_pre": "tekken"}, "'tekken' is not supported"),
        ("llama", {}, "'llama' is not supported"),
    ],
)
def test_an_unknown_kind_of_gguf_is_refused(
    tmp_path: Path, model: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", model, ["a"], **fields))


def test_a_broken_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    whole = Path(write_gguf(tmp_path / "whole.gguf", "gpt2", ["a", "b"] * 50)).read_bytes()
    for content in (
        b"",
        b"nonsense",
        whole[:20],
        whole[: len(whole) // 2],
        b"GGUF\x00\x00\x00\x03" + whole[8:],
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"m\.gguf"):
            load_tokenizer(str(file))


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level model folder; id 2 is special."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    backend = byte_tokenizer(tmp_path / "config.json").backend
    backend.decoder = decoders.ByteLevel()
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folder_is_read_with_all_that_lies_beside_its_tokenizer(folder: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "<|end2|>",
        "chat_template": "in config",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (
        "<s>",
        "<|end2|>",
        "in config",
    )
    assert tokenizer.decode(tokenizer.encode("longer than four é", False)) == "longer than four é"
    assert tokenizer.eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (folder / "chat_template.jinja").write_text("in a file")
    tokenizer = load_tokenizer(str(folder / "config.json"))
    assert tokenizer.eos_token_ids == (2, 7)
    assert tokenizer.chat_template == "in a file"


def test_of_several_templates_one_is_the_default_and_one_for_tools(folder: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("plain", "tools")
    (folder / "chat_template.jinja").write_text("newer")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("newer", "newer")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("one", "one")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("in a file")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("one", "in a file")


def test_the_end_token_is_the_tokenizers_if_no_config_names_one(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 300}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end2|>"}')
    assert load_tokenizer(str(folder)).eos_token_ids == (2,)


def test_a_byte_fallback_folder_keeps_spaces(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode([97, 98]) == "ab"


def test_a_decoder_of_no_served_model_is_refused(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json has the decoder WordPiece, .* take a model"
    ):
        load_tokenizer(str(folder))


def test_a_byte_level_tokenizer_may_lack_its_decoder(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": None}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode("a é", False)) == "a é"


def test_a_broken_folder_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(folder))


# Models without a tokenizer


def test_a_config_alone_is_served_byte_by_byte(bytewise: Tokenizer) -> None:
    assert bytewise.encode("hé", True) == [0x68, 0xC3, 0xA9]
    assert bytewise.decode([0x68, 0xC3, 0xA9, 2, 299]) == "hé t299"
    assert all(bytewise.token_bytes(token) for token in range(300))
    assert bytewise.eos_token_ids == (2,)
    assert bytewise.chat_template


def test_a_small_vocabulary_leaves_out_what_it_cannot_say(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text('{"vocab_size": 128, "eos_token_id": 2}')
    tokenizer = load_tokenizer(str(tmp_path / "tiny.json"))
    assert tokenizer.vocab_size == 128
    assert tokenizer.encode("aé\x02b", False) == [97, 98]


def test_weights_are_not_served_without_their_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"weights but no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_path_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor config\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no vocab_size"):
        load_tokenizer(str(tmp_path))
