"""Who types a name that is not ours is told ours."""

from __future__ import annotations

import re

import pytest

from kvrelay import cli
from kvrelay.flag_names import BEFORE, GONE, VLLM, answer_for
from scripts.reference.command_line import commands

SERVING = ("up", "serve", "prefill", "decode", "router", "rank")
FLAGS = {
    flag
    for each in commands()
    if each.name in SERVING
    for one in each.parameters
    for flag in one.flags
}


def test_each_name_that_is_told_is_a_flag_and_no_flag_is_called_wrong() -> None:
    told = [*BEFORE.values(), *(ours for ours, _ in VLLM.values() if ours)]
    assert {flag for text in told for flag in text.split()} <= FLAGS
    notes = [*GONE.values(), *(note for _, note in VLLM.values())]
    named_in_notes = {flag for note in notes for flag in re.findall(r"--[a-z-]+", note)}
    assert named_in_notes <= FLAGS
    assert not FLAGS & {*BEFORE, *GONE, *VLLM}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("serve --max-running 4", "unknown flag --max-running; its name is --max-num-seqs now"),
        (
            "up --no-prefix-cache",
            "unknown flag --no-prefix-cache; its name is --no-enable-prefix-caching now",
        ),
        ("router --no-conditional-disaggregation", "; its name is --strict-roles now"),
        (
            "router --no-balance",
            "; leave it out; nodes change their roles unless --strict-roles is given",
        ),
        ("up --lora a=b", "unknown flag --lora; its name is --enable-lora --lora-modules now"),
        (
            "rank --node-rank 1",
            "unknown flag --node-rank; here it is --machine (of `kvrelay rank`)",
        ),
        (
            "serve --trust-remote-code",
            "unknown flag --trust-remote-code; leave it out; no code of a model is run",
        ),
        ("serve --max-num-seq 4", "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        ("serve one -tp 2", "unknown flag -tp; here it is --tensor-parallel-size"),
        ("serve one -tp=2", "unknown flag -tp; here it is --tensor-parallel-size"),
        ("serve one -O3", "unknown flag -O; has no counterpart; leave it out"),
        ("serve one -dp 2", "unknown flag -dp; here it is --prefill (and --decode"),
        ("serve one --middleware x", "unknown flag --middleware\n"),
        (
            "up --kv-port 1",
            "unknown flag --kv-port; it is of `kvrelay serve`, `kvrelay prefill`, `kvrelay decode`",
        ),
        (
            "router --max-num-seqs 4",
            "unknown flag --max-num-seqs; it is of `kvrelay up`, `kvrelay serve`",
        ),
        ("serve one two", "Got unexpected extra argument(s) (two)\n"),
        ("doctor --url http://127.0.0.1:1", "unknown flag --url; here it is --router\n"),
        ("top --url=http://127.0.0.1:1", "unknown flag --url; here it is --router\n"),
        ("chat --router 127.0.0.1:1", "unknown flag --router; here it is --url\n"),
        ("bench --router 127.0.0.1:1 --rate 1", "unknown flag --router; here it is --url\n"),
        ("batch a b --router 127.0.0.1:1", "unknown flag --router; here it is --url\n"),
        (
            "serve --router udp://127.0.0.1:1",
            "unknown flag --router; it is of `kvrelay prefill`, `kvrelay decode`\n",
        ),
        ("doctor http://127.0.0.1:1", "Got unexpected extra argument(s) (http://127.0.0.1:1)\n"),
        (
            "serve one --served-model-name a b",
            "extra argument(s) (b): --served-model-name takes one value\n",
        ),
        (
            "serve one --lora-modules a=b c=d e=f",
            "--lora-modules takes one value; give it again for each further one\n",
        ),
        ("up one --model two", "two models are named, one and --model two; leave one of them out"),
    ],
)
def test_wrong_flags_are_answered_with_the_right_ones(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(typed.split()) == 2
    assert said in capsys.readouterr().err


def test_keys_of_a_file_are_answered_alike() -> None:
    assert answer_for("max_batched_tokens") == "its name is --max-num-batched-tokens now"
    assert answer_for("kv-transfer-config").startswith("here it is --kv-connector (")
    assert answer_for("max_num_seqs") == ""
