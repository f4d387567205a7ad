"""Answers of several choices among real processes: equal to those of one node, however they were
computed.
"""

import json
import signal
from typing import Any

import httpx2
import pytest
from real_cluster import DRAWN, complete, running, tiny_body, tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]

BLOCK = 16
PROMPT = [2 + (i * i * 7 + 13 * i) % 300 for i in range(5 * BLOCK + 9)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    flags = tiny_model(folder, 2048)
    flags += ["--no-enable-prefix-caching"]
    with running(folder, prefill=1, decode=2, flags=flags) as ours:
        yield ours


def asked(url: str, prompt=PROMPT, **fields) -> Any:
    return complete(url, prompt, **DRAWN | fields)


def choices(answer: dict) -> list[tuple]:
    """All that is said of each choice, in order."""
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        (c["text"], json.dumps(c["logprobs"]), c["finish_reason"], c["stop_reason"])
        for c in answer["choices"]
    ]


def streamed(url: str, **fields) -> tuple[list[dict], list[str]]:
    """Return all chunks, and the text of each choice."""
    chunks = asked(url, stream=True, **fields)
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return chunks, [text for _, text in sorted(texts.items())]


def texts_of(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def fetches(cluster) -> float:
    return sum(node.metric("kvrelay_fetches_total") for node in cluster.of("decode"))


@pytest.mark.parametrize(
    "fields", [{"logprobs": 2}, {"ignore_eos": False, "stop": ["a", "e"]}, {"max_tokens": 1}]
)
def test_four_choices_are_those_of_one_node_and_differ_and_come_again(cluster, fields):
    decode = cluster.of("decode")[0]
    before = fetches(cluster)
    handed_over = asked(cluster.url, n=4, **fields)
    if fields != {"max_tokens": 1}:
        assert fetches(cluster) - before == 1
    assert choices(handed_over) == choices(asked(decode.url, n=4, **fields))
    assert len(set(choices(handed_over))) >= (
        4 if handed_over["usage"]["completion_tokens"] > 4 else 2
    )
    assert choices(handed_over) == choices(asked(cluster.url, n=4, **fields))
    one = asked(cluster.url, **fields)
    assert choices(one) == choices(handed_over)[:1]
    assert handed_over["usage"]["prompt_tokens"] == len(PROMPT)
    _, texts = streamed(cluster.url, n=4, **fields)
    assert texts == texts_of(handed_over)


def test_a_client_that_leaves_ends_every_choice(cluster):
    body = tiny_body([PROMPT, PROMPT[:40], [7, 8, 9]], n=3, max_tokens=900, stream=True)
    for url in (cluster.url, cluster.of("decode")[0].url):
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for seen, _ in enumerate(answer.iter_lines()):
                if seen > 40:
                    break
        cluster.all_blocks_free()


def test_choices_with_logprobs_outlive_their_decode_node(cluster):
    """Killed in the middle of three choices; each goes on elsewhere, and nobody could tell."""
    fields = {"n": 3, "logprobs": 1, "max_tokens": 200, "stream_options": {"include_usage": True}}
    whole, texts = streamed(cluster.url, **fields)
    body = tiny_body(PROMPT, stream=True, **DRAWN, **fields)
    victim, chunks = None, []
    try:
        with httpx2.stream(
            "POST", f"{cluster.url}/v1/completions", json=body, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                if len(chunks) == 60 and victim is None:
                    (victim,) = (node for node in cluster.of("decode") if node.at_work())
                    victim.kill(signal.SIGKILL)
    finally:
        if victim is not None:
            cluster.restored(victim)
    assert cluster.router is not None
    assert cluster.router.metric("kvrelay_failovers_total") > 0

    def said(of: list[dict], index: int) -> tuple[str, list, list]:
        mine = [c["choices"][0] for c in of if c["choices"] and c["choices"][0]["index"] == index]
        logprobs = [lp for c in mine if c["logprobs"] for lp in c["logprobs"]["token_logprobs"]]
        return (
            "".join(c["text"] for c in mine),
            logprobs,
            [c["finish_reason"] for c in mine if c["finish_reason"]],
        )

    for index in range(3):
        assert said(chunks, index) == said(whole, index)
        assert (said(chunks, index)[0], said(chunks, index)[2]) == (texts[index], ["length"])
    assert chunks[-1]["usage"] == whole[-1]["usage"]
