"""The ranks of a tensor-parallel group and what they say to each other.

Rank 0 runs the engine and broadcasts each step; all compute it, and sum up their parts of the
hidden state. Collectives are torch.distributed's: gloo between CPUs, NCCL between GPUs.

When rank 0 has seen a step end, all ranks are through with its KV: its last collective (the
gathering of logits, or a sum of nothing) needs all ranks. So rank 0 alone says when other nodes can read
or write blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeAlias

import msgspec
import torch
import torch.distributed
from torch._C._distributed_c10d import TCPStore

from kvrelay.paged_engine.rank_address import interface_towards, listen_for_ranks
from kvrelay.wire.errors import ConfigError, PeerLost

__all__ = ["Alone", "Ranks", "TorchRanks"]

_DEADLINE = timedelta(seconds=300)
# So that a step costs one broadcast.
_FRAME_BYTES = 16 << 10
_LENGTH_BYTES = 8


class Alone:
    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value

    def require_equal(self, facts: Mapping[str, str]) -> None: ...

    def broadcast(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class TorchRanks:
    """A group over torch.distributed. All ranks call its methods in the same order."""

    def __init__(self, address: str, rank: int, size: int, device: torch.device) -> None:
        """Meet the others at rank 0's `host:port`. Raises ConfigError if they do not come."""
        self.rank, self.size = rank, size
        interface = interface_towards(address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        try:
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=_meeting(address, rank, size),
                rank=rank,
                world_size=size,
                timeout=_DEADLINE,
                device_id=device if on_gpu else None,
            )
            # Idle engines send nothing for long.
            self._messages = torch.distributed.new_group(
                backend="gloo", timeout=timedelta(days=365)
            )
        except (RuntimeError, OSError) as why:
            raise ConfigError(
                f"rank {rank} of {size} did not meet all others at tensor_parallel_address "
                f"{address!r}, where they are awaited for {_DEADLINE.total_seconds():g} s: "
                f"{str(why).splitlines()[0]}; give all ranks rank 0's address, start each of them "
                "once, and let no firewall stand between their hosts"
            ) from why

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Return all ranks' x [rows, shard] side by side, cut to [rows, columns]."""
        rows, shard = x.shape[0], -(-columns // self.size)
        if x.shape[1] < shard:  # the last rank's share
            x = torch.nn.functional.pad(x, (0, shard - x.shape[1]))
        gathered = torch.empty(self.size * rows, shard, dtype=x.dtype, device=x.device)
        _all_gather(gathered, x.contiguous())
        return gathered.view(self.size, rows, shard).transpose(0, 1).reshape(rows, -1)[:, :columns]

    def minimum(self, value: int) -> int:
        least = torch.tensor(value)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self._messages)
        return int(least)

    def require_equal(self, facts: Mapping[str, str]) -> None:
        """Raise ConfigError, on all ranks, if one has other facts than rank 0."""
        theirs = facts
        if self.rank == 0:
            self.broadcast(msgspec.json.encode(facts))
        else:
            theirs = msgspec.json.decode(self.receive(), type=dict[str, str])
        wrong = [name for name in facts if facts[name] != theirs.get(name)]
        if self.minimum(int(not wrong)):
            return
        what = (
            f"{wrong[0]} is {facts[wrong[0]]} here and {theirs.get(wrong[0])} on rank 0"
            if wrong
            else "see their logs"
        )
        raise ConfigError(
            f"the ranks differ: {what}; start all of them with the same model and flags"
        )

    def broadcast(self, message: bytes) -> None:
        """Send every other rank a message (rank 0 alone); an empty one ends them."""
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        first = bytearray(_FRAME_BYTES)
        head = length + message[: _FRAME_BYTES - _LENGTH_BYTES]
        first[: len(head)] = head
        self._broadcast(torch.frombuffer(first, dtype=torch.uint8))
        rest = bytearray(message[_FRAME_BYTES - _LENGTH_BYTES :])
        if rest:
            self._broadcast(torch.frombuffer(rest, dtype=torch.uint8))

    def receive(self) -> bytes:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._broadcast(frame)
        first = frame.numpy().tobytes()
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        message = first[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(message) < length:
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            self._broadcast(rest)
            message += rest.numpy().tobytes()
        return message

    def _broadcast(self, x: torch.Tensor) -> None:
        try:
            torch.distributed.broadcast(x, src=0, group=self._messages)
        except RuntimeError as why:
            raise PeerLost(
                f"a rank of the tensor-parallel engine was lost: {str(why).splitlines()[0]}"
            ) from why

    def close(self) -> None:
        torch.distributed.destroy_process_group()


Ranks: TypeAlias = Alone | TorchRanks


def _meeting(address: str, rank: int, size: int) -> TCPStore:
    host, _, port = address.rpartition(":")
    door = listen_for_ranks(address).detach() if rank == 0 else None
    return TCPStore(host, int(port), size, rank == 0, _DEADLINE, master_listen_fd=door)


# torch 2.13 has renamed it.
_all_gather = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)
