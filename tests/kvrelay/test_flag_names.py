"""Who types a name of vLLM's is told ours."""

from __future__ import annotations

import re

import pytest

from kvrelay import cli
from kvrelay.flag_names import VLLM
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
    told = {flag for answer in VLLM.values() for flag in re.findall(r"--[a-z-]+", answer)}
    assert told <= FLAGS
    assert not FLAGS & {*VLLM}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rank --node-rank 1", "unknown flag --node-rank; here it is --machine (of"),
        ("serve --trust-remote-code", "; leave it out; model code is never run"),
        ("serve one -tp=2", "unknown flag -tp; here it is --tensor-parallel-size"),
        ("serve one -O3", "unknown flag -O; has no counterpart; leave it out"),
        ("serve one -dp 2", "unknown flag -dp; here it is --prefill (and --decode"),
        ("serve --max-num-seq 4", "No such option: --max-num-seq"),
        ("serve one two", "Got unexpected extra argument(s) (two)\n"),
        ("up one --model two", "two models are named, one and --model two; leave one of them out"),
    ],
)
def test_wrong_flags_are_answered_with_the_right_ones(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(typed.split()) == 2
    assert said in capsys.readouterr().err
