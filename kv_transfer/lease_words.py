"""Which leases a source holds, in memory that readers on its host can look into: the exit fence
without a question.

The source has one word per lease: its epoch, while the lease is held. A word is cleared under the
desk's lock, before the step loop hears that the lease has ended and can use the blocks again. So a
reader that finds the epoch there after its last byte has the right bytes. If it does not, it has
learned nothing (many leases share few words) and asks. What a killed or stopped source has left
there stays true: nobody writes to its blocks any more, or not yet.
"""

from __future__ import annotations

import contextlib
import os

from kvrelay.kv_transfer.host_files import HostFile, mapped, place_of
from kvrelay.kv_transfer.leases import LeaseId
from kvrelay.wire.errors import TransferError

__all__ = ["HeldWords", "LeaseWords"]

# 512 KiB. Leases whose epochs are equal modulo this share a word; the younger one has it.
_WORDS = 1 << 16
_WORD_BYTES = 8
_GENERATION_BYTES = 32


class LeaseWords:
    """The source's side. `place` is what readers are told; None where memory cannot be shared."""

    def __init__(self, generation: str) -> None:
        """`generation`: of this process, by which a reader knows that the memory is ours."""
        # Not before the engine has been imported, which sees to it that `kernels` is ours.
        from kvrelay.kernels.pool_memory import sealed_memory

        self.place: HostFile | None = None
        self._epochs: dict[str, int] = {}
        self._words: memoryview | None = None
        proof = generation.encode()
        if len(proof) != _GENERATION_BYTES:
            raise ValueError(f"generation of {len(proof)} bytes, not {_GENERATION_BYTES}")
        with contextlib.suppress(AttributeError, OSError, ValueError):
            size = _GENERATION_BYTES + _WORDS * _WORD_BYTES
            self._file, memory = sealed_memory("kvrelay-leases", size)
            memory[:_GENERATION_BYTES] = proof
            self._words = memoryview(memory)[_GENERATION_BYTES:].cast("Q")
            self.place = place_of(self._file)

    def begin(self, lease: LeaseId) -> None:
        """The lease is held from here on."""
        if self._words is not None:
            self._epochs[lease.request_id] = lease.epoch
            self._words[lease.epoch % _WORDS] = lease.epoch

    def end(self, request_id: str) -> None:
        """The lease of this request is not held any more; unknown ids are ignored."""
        epoch = self._epochs.pop(request_id, None)
        if epoch is not None and self._words is not None and self._words[epoch % _WORDS] == epoch:
            self._words[epoch % _WORDS] = 0

    def close(self) -> None:
        """No lease is held any more."""
        for request_id in list(self._epochs):
            self.end(request_id)
        if self.place is not None:
            self.place = None
            os.close(self._file)


class HeldWords:
    """The reader's side."""

    def __init__(self, place: HostFile, generation: str, engine_id: str) -> None:
        """Raises TransferError if that memory cannot be seen from here, or is another's."""
        memory = mapped(
            place, _GENERATION_BYTES + _WORDS * _WORD_BYTES, engine_id, "table of leases"
        )
        if memory[:_GENERATION_BYTES] != generation.encode():
            raise TransferError(f"what {engine_id} said is its table of leases is another's")
        self._words = memoryview(memory)[_GENERATION_BYTES:].cast("Q")

    def held(self, lease: LeaseId) -> bool:
        """True: the source holds it now. False: it may or may not."""
        return bool(self._words[lease.epoch % _WORDS] == lease.epoch != 0)
