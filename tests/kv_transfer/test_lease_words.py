"""What a source writes of its leases, and what a reader of its host makes of it."""

import os
from pathlib import Path

import pytest

from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.kv_transfer.host_memory import HeldWords, HostFile, LeaseWords
from kvrelay.wire.errors import TransferError

GENERATION = "0123456789abcdef" * 2


@pytest.fixture
def words():
    words = LeaseWords(GENERATION)
    yield words
    words.close()


def test_a_lease_is_seen_while_it_is_held(words: LeaseWords) -> None:
    assert words.place is not None
    seen = HeldWords(words.place, GENERATION, "source")
    first, second = LeaseId("a", 1), LeaseId("b", 2)
    words.begin(1)
    words.begin(2)
    assert seen.held(first)
    assert seen.held(second)
    words.end(1)
    words.end(3)
    assert not seen.held(first)
    assert seen.held(second)
    words.begin(3)  # offered again: another lease
    assert not seen.held(first)
    assert seen.held(LeaseId("a", 3))


def test_leases_that_share_a_word_are_never_taken_for_each_other(words: LeaseWords) -> None:
    assert words.place is not None
    seen = HeldWords(words.place, GENERATION, "source")
    older, younger = LeaseId("old", 5), LeaseId("young", 5 + (1 << 16))
    words.begin(older.epoch)
    words.begin(younger.epoch)
    assert not seen.held(older)  # its reader asks
    words.end(older.epoch)
    assert seen.held(younger)
    words.end(younger.epoch)
    assert not seen.held(younger)


def test_epoch_0_is_no_lease(words: LeaseWords) -> None:
    assert words.place is not None
    assert not HeldWords(words.place, GENERATION, "source").held(LeaseId("a", 0))


def test_a_closed_source_holds_nothing(words: LeaseWords) -> None:
    assert words.place is not None
    seen = HeldWords(words.place, GENERATION, "source")
    words.begin(1)
    words.close()
    assert not seen.held(LeaseId("a", 1))
    assert words.place is None


def test_what_is_not_the_sources_memory_is_refused(words: LeaseWords, tmp_path: Path) -> None:
    assert words.place is not None
    here = words.place.pid_namespace
    with pytest.raises(TransferError, match="is another's"):
        HeldWords(words.place, "f" * 32, "source")
    with pytest.raises(TransferError, match="one PID namespace"):
        HeldWords(HostFile(here + 1, os.getpid(), words.place.file), GENERATION, "source")
    with pytest.raises(TransferError, match="has ended"):
        HeldWords(HostFile(here, os.getpid(), 10**6), GENERATION, "source")
    with (tmp_path / "file").open("wb") as plain:
        plain.truncate(1 << 20)
        with pytest.raises(TransferError, match="not sealed memory"):
            HeldWords(HostFile(here, os.getpid(), plain.fileno()), GENERATION, "source")
