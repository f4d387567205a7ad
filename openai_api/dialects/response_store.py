"""Stored responses, in SQLite, which later requests continue.

A response belongs to the key that made it; for others it does not exist. Where bytes run out, the
owner with the most loses its least recently used response. A file is shared by the processes of one
router.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrelay.wire.errors import NotFound, Unavailable

__all__ = ["IN_MEMORY", "ResponseStore", "Stored"]

IN_MEMORY = ":memory:"
_MAX_BYTES = 128 << 20
_LEAST_BYTES = 32 << 10  # that a response counts for: there are 4,096 at most
_WAIT_S = 2.0

_log = logging.getLogger("kvrelay.responses")

# The index finds the owner with the most without reading rows.
_TABLE = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS kept (
    owner TEXT, id TEXT, size INTEGER, used INTEGER, body BLOB, turns BLOB,
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS by_owner ON kept (owner, used, size);
CREATE INDEX IF NOT EXISTS by_use ON kept (used);
"""
_NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM kept)"
_OLDEST = "SELECT rowid, size FROM kept WHERE owner = ? ORDER BY used LIMIT 1"


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as it was sent, and its conversation: the JSON of items, without brackets."""

    body: bytes = b""
    turns: bytes = b""


class ResponseStore:
    """A store by owner and id. All methods but `put` raise Unavailable if the file cannot be used."""

    def __init__(
        self, path: str = IN_MEMORY, max_bytes: int = _MAX_BYTES, least_bytes: int = _LEAST_BYTES
    ) -> None:
        self._max_bytes, self._least_bytes = max_bytes, least_bytes
        self._lock = threading.Lock()
        if path != IN_MEMORY:
            Path(path).touch(mode=0o600)
        self._db = sqlite3.connect(
            path, timeout=_WAIT_S, isolation_level="IMMEDIATE", check_same_thread=False
        )
        self._db.executescript(_TABLE)

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Store a response, unless it is larger than the store or the file cannot be used."""
        size = max(len(stored.body) + len(stored.turns), self._least_bytes)
        if size > self._max_bytes:
            return
        row = (owner, response_id, size, stored.body, stored.turns)
        try:
            with self._using() as db:
                db.execute(f"INSERT OR REPLACE INTO kept VALUES (?, ?, ?, {_NEXT}, ?, ?)", row)
                self._make_room(db)
        except Unavailable as why:  # its answer is whole, and mostly read
            _log.warning("response %s is not kept: %s", response_id, why.message)

    def _make_room(self, db: sqlite3.Connection) -> None:
        # The owners with the most lose their oldest.
        asked = "SELECT owner, SUM(size) FROM kept GROUP BY owner ORDER BY MAX(used)"
        held = Counter(dict(db.execute(asked).fetchall()))
        over = held.total() - self._max_bytes
        while over > 0:
            owner = max(held, key=held.__getitem__)
            row, gone = db.execute(_OLDEST, (owner,)).fetchone()
            db.execute("DELETE FROM kept WHERE rowid = ?", (row,))
            held[owner] -= gone
            over -= gone

    def get(self, owner: str, response_id: str, param: str | None = None) -> Stored:
        """Return a response. Raises NotFound, with `param` as the field that named it."""
        with self._using() as db:
            asked = (owner, response_id)
            db.execute(f"UPDATE kept SET used = {_NEXT} WHERE owner = ? AND id = ?", asked)
            found = db.execute("SELECT body, turns FROM kept WHERE owner = ? AND id = ?", asked)
            row = found.fetchone()
        if row is None:
            raise _missing(response_id, param)
        return Stored(*row)

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises NotFound."""
        with self._using() as db:
            found = db.execute(
                "DELETE FROM kept WHERE owner = ? AND id = ?", (owner, response_id)
            ).rowcount
        if not found:
            raise _missing(response_id, None)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._db:
                yield self._db
        except sqlite3.Error as why:
            raise Unavailable(
                f"the file of kept responses cannot be used ({why}); free room in its folder"
            ) from why


def _missing(response_id: str, param: str | None) -> NotFound:
    return NotFound(
        f"response {response_id!r} is not kept here: it was never stored (store: false), was "
        f"deleted, gave way to newer ones ({_MAX_BYTES >> 20} MiB are kept at most), or this server was "
        "restarted",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )
