"""API keys: found by their hashes, and what each may do."""

from __future__ import annotations

import pytest

from kvrelay.router.admission.keys import (
    ANYONE,
    Caller,
    callers_by_hash,
    draw_key,
    hash_of,
    owner_of,
)
from kvrelay.settings import build, flags_of, merge, settings_of
from kvrelay.wire.errors import ConfigError, Forbidden, NotFound, RequestError, Unauthorized
from kvrelay.wire.router_config import KeyConfig, RouterConfig

ALICE, BOB = draw_key(), draw_key()
KEYS = (
    KeyConfig("alice", hash_of(ALICE), weight=2, priority=3, requests_per_minute=6, max_running=2),
    KeyConfig("bob", hash_of(BOB), models=("tiny",), admin=True),
)


def test_a_key_is_found_among_all_and_anything_else_is_nobody() -> None:
    ring = callers_by_hash("in-clear", (*KEYS, KeyConfig("placeholder", "0" * 64)))
    assert [owner_of(key, ring).name for key in (ALICE, BOB, "in-clear")] == [
        "alice",
        "bob",
        "api-key",
    ]
    for wrong in ("", "alice", hash_of(ALICE), ALICE[:-1], ALICE + "x", "\udcff"):
        with pytest.raises(Unauthorized):
            owner_of(wrong, ring)


def test_without_keys_anyone_may_do_everything() -> None:
    assert owner_of("whatever", callers_by_hash("", ())) is ANYONE
    ANYONE.check_admin()
    ANYONE.check_model("any")
    assert ANYONE.check_priority(-7) == -7


def test_what_a_key_may_do() -> None:
    alice, bob = map(Caller.of, KEYS)
    assert (alice.check_priority(None), alice.check_priority(9)) == (3, 9)
    with pytest.raises(Forbidden, match="priority 2 is more important"):
        alice.check_priority(2)
    with pytest.raises(RequestError, match="priority must be between"):
        alice.check_priority(2**31)
    with pytest.raises(Forbidden, match="alice may not change"):
        alice.check_admin()
    bob.check_admin()
    alice.check_model("any")
    with pytest.raises(NotFound, match="served to it: 'tiny'"):
        bob.check_model("other")


def test_keys_of_a_file_are_those_of_the_flags_that_a_child_gets(tmp_path: object) -> None:
    file = f"{tmp_path}/router.yaml"
    with open(file, "w", encoding="utf-8") as out:
        out.write(
            f"max-queue: 5\nkeys:\n- name: alice\n  sha256: {hash_of(ALICE)}\n  weight: 2\n  "
            f"priority: 3\n"
            f"  requests-per-minute: 6\n  max_running: 2\n"
            f"- {{name: bob, sha256: {hash_of(BOB)}, models: [tiny], admin: yes}}\n"
        )
    known = settings_of(RouterConfig)
    config = build(RouterConfig, merge(known, {}, file))
    assert config.keys == KEYS
    given = [
        flag.removeprefix("--keys=") for flag in flags_of(config) if flag.startswith("--keys=")
    ]
    assert build(RouterConfig, merge(known, {"keys": given, "max_queue": "5"}, None)) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: alice", "keys must be a list of mappings, got a str"),
        ("keys: [5]", "keys[0] must be a mapping, got a int"),
        ("keys: [{name: a}]", "keys[0]: sha256 missing"),
        ("keys: [{name: a, sha: b}]", "unknown key 'sha'; did you mean sha256?"),
        ("keys: [{name: a b, sha256: x}]", "a key's name must be"),
        ("keys: [{name: a, sha256: secret-key-in-clear}]", "sha256 of key a must be 64"),
        (
            f"keys: [{{name: a, sha256: {'a' * 64}, weight: 0}}]",
            "weight of key a must be at least 1e-06",
        ),
        (
            f"keys: [{{name: a, sha256: {'a' * 64}, max_queue: -1}}]",
            "max_queue of key a must be at least 0",
        ),
        (
            f"keys: [{{name: a, sha256: {'a' * 64}}}, {{name: a, sha256: {'b' * 64}}}]",
            "keys have the same name: a",
        ),
        (
            f"keys: [{{name: a, sha256: {'a' * 64}}}, {{name: b, sha256: {'a' * 64}}}]",
            "have the same sha256: a, b",
        ),
    ],
)
def test_a_wrong_key_in_a_file_is_told_and_never_repeated(
    text: str, said: str, tmp_path: object
) -> None:
    file = f"{tmp_path}/router.yaml"
    with open(file, "w", encoding="utf-8") as out:
        out.write(text)
    with pytest.raises(ConfigError) as caught:
        build(RouterConfig, merge(settings_of(RouterConfig), {}, file))
    assert said in caught.value.message
    assert "secret-key-in-clear" not in caught.value.message
