"""The address at which ranks meet: every mistake is one sentence with the address and what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from benchmarks.local_cluster import free_ports
from kvrelay.paged_engine import ranks
from kvrelay.paged_engine.rank_address import check_rank_0, interface_towards, listen_for_ranks
from kvrelay.paged_engine.ranks import TorchRanks
from kvrelay.wire.errors import ConfigError

# Of a network that is for documentation only (RFC 5737): no host has it.
ELSEWHERE = "192.0.2.7"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free() -> int:
    """A port at which nobody listens."""
    return free_ports(1)[0]


def test_a_free_port_of_this_host_is_taken_as_it_is(free: int) -> None:
    check_rank_0(f"127.0.0.1:{free}")
    check_rank_0(f"localhost:{free}")
    assert interface_towards(f"localhost:{free}") == "lo"


def test_a_port_that_is_taken_is_refused(taken: int) -> None:
    message = (
        rf"cannot listen at tensor_parallel_address '127.0.0.1:{taken}': "
        rf"port {taken} is taken; choose another one"
    )
    with pytest.raises(ConfigError, match=message):
        check_rank_0(f"127.0.0.1:{taken}")


def test_rank_0_listens_at_its_address_and_at_no_other(free: int) -> None:
    with listen_for_ranks(f"127.0.0.1:{free}") as door, socket.socket() as other:
        assert door.getsockname() == ("127.0.0.1", free)
        other.bind(("127.0.0.2", free))  # taken if the first listened everywhere


@pytest.mark.parametrize("host", [ELSEWHERE, "no-such-host.invalid"])
def test_rank_0_is_met_at_an_address_of_its_own_host(host: str, free: int) -> None:
    message = rf"tensor_parallel_address '{host}:{free}' is not of this host, where rank 0 runs .*; give an address of"
    with pytest.raises(ConfigError, match=message):
        check_rank_0(f"{host}:{free}")


def test_a_name_that_nobody_knows_is_refused() -> None:
    message = r"tensor_parallel_address 'no-such-host.invalid:5' cannot be reached .*; give rank 0's host:port"
    with pytest.raises(ConfigError, match=message):
        interface_towards("no-such-host.invalid:5")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_meets_nobody_says_where_it_has_waited(
    rank: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.setattr(ranks, "_DEADLINE", timedelta(seconds=1))
    message = (
        rf"rank {rank} of 2 did not meet all others at tensor_parallel_address "
        rf"'127.0.0.1:{free}'.* for 1 s: .*fire"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        TorchRanks(f"127.0.0.1:{free}", rank, 2, torch.device("cpu"))
    assert "\n" not in caught.value.message
