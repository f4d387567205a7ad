"""A connector that really moves bytes, over a pool of its own, and its events as the step loop
would see them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import cast

import torch
from fake_nccl import FakeNccl
from peer_process import CONFIG, FINGERPRINT
from woken import Woken

from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.backend import TransferBackend
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.direct import DirectBackend
from kvrelay.kv_transfer.nccl import NcclBackend
from kvrelay.kv_transfer.nixl import NixlBackend
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.config import TransferConfig

BLOCKS, BLOCK_BYTES = 64, 1 << 20


class GatedPlane:
    """A plane whose reads go on only while `gate` is open; `posted` says that one was asked for."""

    def __init__(self, plane: TransferBackend) -> None:
        self._plane = plane
        self.gate = threading.Event()
        self.gate.set()
        self.posted = threading.Event()
        self.polls_left: int | None = None
        """If set: the gate closes after so many polls."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._plane, name)

    def post_read(
        self, generation: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> object:
        self.posted.set()
        return self._plane.post_read(generation, remote_blocks, local_blocks)

    def poll(self, handle: object) -> bool:
        if self.polls_left == 0:
            self.polls_left = None
            self.gate.clear()
        if not self.gate.is_set():
            return False
        if self.polls_left is not None:
            self.polls_left -= 1
        return self._plane.poll(handle)


class RealNode(Woken):
    """`pool` is uint8 [num_blocks, block_bytes]."""

    def __init__(
        self,
        name: str,
        kind: str,
        num_blocks: int = BLOCKS,
        block_bytes: int = BLOCK_BYTES,
        device: str = "cpu",
        config: TransferConfig = CONFIG,
    ) -> None:
        self.pool = zeros(num_blocks * block_bytes, torch.device(device)).view(
            num_blocks, block_bytes
        )
        super().__init__()
        self.region = PoolRegion(self.pool.data_ptr(), num_blocks, block_bytes, device)
        plane: TransferBackend
        if kind == "direct":
            plane = DirectBackend(self.region)
        elif kind == "nixl":
            plane = NixlBackend(f"{name}-{time.monotonic_ns()}", self.region, config.kv_host)
        else:
            plane = NcclBackend(
                self.region,
                config.kv_host,
                config.transfer_deadline_s,
                config.lease_s,
                nccl=FakeNccl(config.lease_s),
            )
        self.plane = GatedPlane(plane)
        planes = {kind: cast(TransferBackend, self.plane)}
        self.desk = self.watching = TransferEngine(
            name, FINGERPRINT, self.region, config, self.woken.set, planes
        )

    def fill(self) -> None:
        """Block i is full of i + 1."""
        self.pool[:] = (torch.arange(len(self.pool), device=self.pool.device) + 1).to(torch.uint8)[
            :, None
        ]
        if self.pool.is_cuda:
            torch.cuda.synchronize()
