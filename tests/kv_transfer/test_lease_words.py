"""What a source writes of its leases, and what a reader of its host makes of it."""

from collections.abc import Iterator

import pytest

from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.kv_transfer.host_memory import HeldWords, LeaseWords
from kvrelay.wire.errors import TransferError

GENERATION = "0123456789abcdef" * 2


@pytest.fixture
def words() -> Iterator[LeaseWords]:
    words = LeaseWords(GENERATION)
    yield words
    words.close()


@pytest.fixture
def seen(words: LeaseWords) -> HeldWords:
    assert words.place is not None
    return HeldWords(words.place, GENERATION, "source")


def test_a_lease_is_seen_while_it_is_held(words: LeaseWords, seen: HeldWords) -> None:
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
    assert not seen.held(LeaseId("a", 0))
    words.close()
    assert not seen.held(second)
    assert words.place is None


def test_leases_that_share_a_word_are_never_taken_for_each_other(
    words: LeaseWords, seen: HeldWords
) -> None:
    older, younger = LeaseId("old", 5), LeaseId("young", 5 + (1 << 16))
    words.begin(older.epoch)
    words.begin(younger.epoch)
    assert not seen.held(older)  # its reader asks
    words.end(older.epoch)
    assert seen.held(younger)
    words.end(younger.epoch)
    assert not seen.held(younger)


def test_words_of_another_process_are_refused(words: LeaseWords) -> None:
    assert words.place is not None
    with pytest.raises(TransferError, match="is another's"):
        HeldWords(words.place, "f" * 32, "source")
