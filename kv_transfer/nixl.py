"""The NIXL backend (UCX): one-sided READs between registered pools, on CPUs and on GPUs.

UCX's listener has no authentication, so it listens on the network devices of `kv_host` alone.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import BlockIds, PoolRegion
from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError

__all__ = ["NixlBackend", "addresses_here", "net_devices", "net_devices_of"]

log = logging.getLogger(__name__)

# Takes and gives an ifreq: 16 bytes of name, then a sockaddr_in.
_SIOCGIFADDR = 0x8915


def net_devices(kv_host: str) -> str | None:
    """Return UCX_NET_DEVICES for this `kv_host`; None for all devices. Raises ConfigError."""
    if is_loopback(kv_host):
        return "lo"
    try:
        number = str(socket.getaddrinfo(kv_host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"kv_host {kv_host!r} is no address: {error}") from error
    return net_devices_of(number, addresses_here(), Path("/sys"))


def net_devices_of(address: str, known: Iterable[tuple[str, str]], sysfs: Path) -> str | None:
    """Return the devices of a number, given (interface, address) pairs. Raises ConfigError."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_unspecified:
        return None
    if wanted.is_loopback:
        return "lo"
    numbers = [(name, ipaddress.ip_address(each.partition("%")[0])) for name, each in known]
    number = ipaddress.ip_address(address.partition("%")[0])
    name = next((name for name, each in numbers if each == number), None)
    if name is None:
        raise ConfigError(
            f"no network interface of this machine has kv_host's address {address}, so UCX would "
            "listen on all of them; take an address of this machine, or set UCX_NET_DEVICES"
        )
    return ",".join([name, *_rdma_ports(name, sysfs)])


def _rdma_ports(name: str, sysfs: Path) -> list[str]:
    interface = sysfs / "class/net" / name
    return sorted(
        f"{device.name}:{port.name}"
        for place in (interface, *interface.glob("lower_*"))
        for device in place.glob("device/infiniband/*")
        for port in (sysfs / "class/infiniband" / device.name / "ports").glob("*")
    )


def addresses_here() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of this machine. Raises ConfigError without Linux."""
    found = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # without an address
                    ifreq = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                    found.append((name, socket.inet_ntoa(ifreq[20:24])))
        with suppress(FileNotFoundError):  # the kernel has no IPv6
            for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
                address, *_, name = line.split()
                found.append((name, str(ipaddress.ip_address(bytes.fromhex(address)))))
    except OSError as error:
        raise ConfigError(
            f"the network interfaces of this machine cannot be listed: {error}"
        ) from error
    return found


# By then bytes in UCX's buffers are in, and our GPU's copies (4 GiB at 20 GB/s).
COPIED_S = 0.25


@dataclass(slots=True)
class _Remote:
    agent: str
    blocks: Any  # a descriptor per block
    ours: Any  # the same of our pool


@dataclass(slots=True)
class _Handle:
    transfer: Any
    peer: str
    done: bool = False
    error: Exception | None = None
    lost: PeerLost | None = None
    over_at: float = 0.0
    """When nothing lands any more, if it is lost."""


class NixlBackend:
    helps_readers = True

    def __init__(self, name: str, region: PoolRegion, host: str) -> None:
        """`name` is unique among agents; UCX listens on `host`'s interface alone."""
        self._name = name
        self._region = region
        self._host = host
        self._memory, self._device = _memory(region)
        self._errors: tuple[type[Exception], ...] = ()
        self._remotes: dict[str, _Remote] = {}
        self._handles: list[_Handle] = []
        self._prepared: dict[tuple[int, int], Any] = {}
        """Our pool's descriptor lists, by (start, bytes) of a block's part."""

    def prepare(self) -> None:
        """Load NIXL and its UCX plugin, without starting UCX. Raises ConfigError."""
        # Before UCX is loaded, and threads read the environment.
        if "UCX_NET_DEVICES" not in os.environ and (devices := net_devices(self._host)) is not None:
            log.info("UCX takes the network devices %s, of kv_host %s", devices, self._host)
            os.environ["UCX_NET_DEVICES"] = devices
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"kv_connector nixl needs NIXL ({error}): pip install 'kvrelay[node,nixl]'"
            ) from error
        self._disconnected: type[Exception] = _bindings.nixlRemoteDisconnectError
        # NIXL's errors have no common root but Exception.
        named = [
            value
            for name, value in vars(_bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        ]
        self._errors = (RuntimeError, ValueError, OverflowError, *named)
        if self._memory == "VRAM":
            # Else, without NVLink in sight, UCX reads through TCP, at 0.5 GB/s.
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        try:
            # Its progress thread would spin on one core, idle or not.
            self._agent = nixl_agent(
                self._name, nixl_agent_config(enable_prog_thread=False, backends=[])
            )
            self._agent.get_plugin_params("UCX")
        except self._errors as error:
            raise ConfigError(f"NIXL cannot load UCX: {_named(error)}") from error

    def open(self) -> bytes:
        """Start UCX and register the pool (up to 3 s). Returns the metadata."""
        region = self._region
        if self._memory == "VRAM":
            # UCX needs a CUDA context in this thread.
            import torch

            torch.cuda.set_device(self._device)
        try:
            self._agent.create_backend("UCX")
            pool = [(region.address, region.num_blocks * region.block_bytes, self._device, "")]
            self._registered = self._agent.register_memory(pool, self._memory, backends=["UCX"])
            self._ours(0, region.block_bytes)
        except self._errors as error:
            self._end()
            raise ConfigError(
                f"NIXL cannot take the KV pool ({region}) through UCX: {_named(error)}"
            ) from error
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, source: Source) -> None:
        """Load a peer's metadata (8 to 40 ms); prepare one descriptor per block."""
        region = source.region
        try:
            memory, _ = _memory(region)
            name = self._agent.add_remote_agent(source.metadata)
            agent = name.decode() if isinstance(name, bytes) else name
            part = source.part
            blocks = self._agent.prep_xfer_dlist(
                agent, self._table(region, part.remote_start, part.num_bytes), memory
            )
            ours = self._ours(part.local_start, part.num_bytes)
        except self._errors as error:
            raise TransferError(
                f"NIXL cannot reach the pool of {source.engine_id}: {_named(error)}"
            ) from error
        self._remotes[source.generation] = _Remote(agent, blocks, ours)

    def post_read(self, source: Source, remote_blocks: BlockIds, local_blocks: BlockIds) -> _Handle:
        """Post one READ. Within a host UCX copies inside this call (CMA)."""
        remote = self._remotes[source.generation]
        indices = [np.array(blocks, dtype=np.int32) for blocks in (local_blocks, remote_blocks)]
        try:
            transfer = self._agent.make_prepped_xfer(
                "READ", remote.ours, indices[0], remote.blocks, indices[1]
            )
        except self._errors as error:
            raise TransferError(
                f"NIXL refused a READ of {len(local_blocks)} blocks: {_named(error)}"
            ) from error
        handle = _Handle(transfer, remote.agent)
        self._handles.append(handle)
        try:
            handle.done = self._agent.transfer(transfer) == "DONE"
        except self._errors as error:
            handle.error = error
        return handle

    def poll(self, handle: object) -> bool:
        """Return True when all is in. NIXL fails by exceptions, never by its "ERR"."""
        assert isinstance(handle, _Handle)
        error, handle.error = handle.error, None
        if error is None and not handle.done and handle.lost is None:
            try:
                handle.done = self._agent.check_xfer_state(handle.transfer) == "DONE"
            except self._errors as raised:
                error = raised
        if isinstance(error, self._disconnected):
            handle.lost = PeerLost(f"{handle.peer} disconnected during a READ ({_named(error)})")
            handle.over_at = time.monotonic() + (COPIED_S if self._memory == "VRAM" else 0.0)
        if handle.lost is not None:
            if time.monotonic() < handle.over_at:
                return False
            self._forget(handle)
            raise handle.lost
        if error is not None:
            raise TransferError(f"a READ from {handle.peer} broke: {_named(error)}") from error
        if handle.done:
            self._forget(handle)
        return handle.done

    def peer_gone(self, generation: str) -> None:
        """Tell UCX, too, which looks for a shared-memory peer every 20 s."""
        remote = self._remotes.get(generation)
        for handle in self._handles:
            if (
                remote is not None
                and handle.peer == remote.agent
                and handle.lost is None
                and not handle.done
            ):
                handle.lost = PeerLost(f"the process of {handle.peer} has ended during a READ")
                handle.over_at = time.monotonic() + COPIED_S

    def drop_peer(self, generation: str) -> None:
        remote = self._remotes.pop(generation)
        self._quietly(remote.blocks.release)
        self._quietly(lambda: self._agent.remove_remote_agent(remote.agent))

    def progress(self) -> None:
        """Serve readers, by asking for notifications."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Give the agent back. A READ in flight goes on: the pool must outlive it."""
        for handle in list(self._handles):
            self._forget(handle)
        for generation in list(self._remotes):
            self.drop_peer(generation)
        for prepared in self._prepared.values():
            self._quietly(prepared.release)
        self._quietly(lambda: self._agent.deregister_memory(self._registered))
        self._end()

    def _end(self) -> None:
        self._prepared.clear()
        del self._agent

    def _ours(self, start: int, size: int) -> Any:
        if (start, size) not in self._prepared:
            table = self._table(self._region, start, size)
            self._prepared[start, size] = self._agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", table, self._memory
            )
        return self._prepared[start, size]

    def _table(self, region: PoolRegion, start: int, size: int) -> Any:
        _, device = _memory(region)
        row = [region.address + start, size, device, region.block_bytes, region.num_blocks]
        return np.array([row], dtype=np.uint64)

    def _forget(self, handle: _Handle) -> None:
        self._handles.remove(handle)
        self._quietly(lambda: self._agent.release_xfer_handle(handle.transfer))

    def _quietly(self, give_back: Callable[[], object]) -> None:
        with suppress(*self._errors):
            give_back()


def _memory(region: PoolRegion) -> tuple[str, int]:
    return ("DRAM", 0) if region.gpu is None else ("VRAM", region.gpu)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
