"""Two keys send one prompt: with --isolate-keys neither sees by its cached tokens that the other
has been there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, further_router

from kvrelay.router.admission.keys import hash_of

pytestmark = pytest.mark.cluster

KEYS = ["--api-key", "ann", "--keys", json.dumps({"name": "bob", "sha256": hash_of("bob")})]
ROUTES: list[tuple[str, Any]] = [
    ("/v1/completions", {"max_tokens": 3}),
    ("/v1/messages", {"max_tokens": 3}),
]


@pytest.fixture(scope="module", params=[False, True], ids=["shared", "isolated"])
def router(request: pytest.FixtureRequest, small: Cluster) -> Iterator[tuple[str, bool]]:
    """Return the URL of a router, and whether it keeps keys apart."""
    with further_router(small, *KEYS, *(["--isolate-keys"] if request.param else [])) as ours:
        yield ours.url, request.param


def cached(url: str, path: str, more: dict[str, Any], key: str, prompt: str) -> int:
    """Tokens of the prompt that were cached."""
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    asked = {field: prompt} if field else {"messages": [{"role": "user", "content": prompt}]}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx2.post(
        url + path, json={"model": "tiny", **asked, **more}, headers=headers, timeout=60
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int(
        usage["input_tokens_details" if field == "input" else "prompt_tokens_details"][
            "cached_tokens"
        ]
    )


@pytest.mark.parametrize(("path", "more"), ROUTES)
def test_a_key_finds_cached_what_another_one_has_sent_unless_they_are_kept_apart(
    router: tuple[str, bool], path: str, more: dict[str, Any]
) -> None:
    url, isolate = router
    prompt = f"{path} {isolate} " + "the ship had been at sea for forty days " * 8
    first, other, again, of_first = (
        cached(url, path, more, key, prompt) for key in ("ann", "bob", "bob", "ann")
    )
    assert first == 0
    assert (other > 0) is not isolate
    assert again == of_first > 0
