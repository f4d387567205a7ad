"""A model folder that both servers take, with random weights: a shape, and a tokenizer of words of
five letters.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["word", "write_model"]

_LED = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""Stands for the space before a word."""
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_model(shape: Path, folder: Path) -> None:
    config = json.loads(shape.read_text(encoding="utf-8"))
    size = config["vocab_size"]
    ids = {name: size - len(_SPECIAL) + at for at, name in enumerate(_SPECIAL)}
    config |= {"bos_token_id": ids["bos_token"], "eos_token_id": ids["eos_token"]}
    vocabulary = {_LED + word(number): number for number in range(size - len(_SPECIAL))}
    vocabulary |= {_SPECIAL[name]: number for name, number in ids.items()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL.values()))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **_SPECIAL,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def word(number: int) -> str:
    return "".join(chr(ord("a") + (number >> bits & 15)) for bits in (16, 12, 8, 4, 0))
