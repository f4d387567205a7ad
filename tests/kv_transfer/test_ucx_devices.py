"""Which network devices UCX may use: over folders as the kernel has them, and over this machine's
own addresses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.kv_transfer.nixl import addresses_here, net_devices, net_devices_of
from kvrelay.wire.errors import ConfigError

KNOWN = [
    ("lo", "127.0.0.1"),
    ("lo", "::1"),
    ("eth0", "10.0.0.7"),
    ("eth0", "10.0.0.8"),
    ("eth0", "fe80::1"),
    ("eth1", "10.1.0.7"),
    ("eth1", "fd00::7"),
    ("ib0", "10.2.0.7"),
    ("bond0", "10.3.0.7"),
]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """eth0 has no RDMA device, eth1 one of one port, ib0 one of two ports and another, bond0 is of
    two interfaces.
    """
    for interface, devices in {
        "eth0": (),
        "eth1": ("mlx5_1",),
        "ib0": ("mlx4_0", "mlx5_2"),
        "eth2": ("mlx5_bond_0",),
        "eth3": (),
        "bond0": (),
    }.items():
        (tmp_path / "class/net" / interface).mkdir(parents=True)
        for device in devices:
            (tmp_path / "class/net" / interface / "device/infiniband" / device).mkdir(parents=True)
    for device, ports in {
        "mlx5_1": 1,
        "mlx4_0": 2,
        "mlx5_2": 1,
        "mlx5_bond_0": 1,
        "mlx5_9": 1,
    }.items():
        for port in range(1, ports + 1):
            (tmp_path / "class/infiniband" / device / "ports" / str(port)).mkdir(parents=True)
    for lower in ("eth2", "eth3"):
        (tmp_path / "class/net/bond0" / f"lower_{lower}").symlink_to(tmp_path / "class/net" / lower)
    return tmp_path


@pytest.mark.parametrize(
    ("address", "devices"),
    [
        ("127.0.0.1", "lo"),
        ("127.0.0.9", "lo"),
        ("::1", "lo"),
        ("10.0.0.7", "eth0"),
        ("10.0.0.8", "eth0"),
        ("fe80::1%eth0", "eth0"),
        ("10.1.0.7", "eth1,mlx5_1:1"),
        ("fd00::7", "eth1,mlx5_1:1"),
        ("10.2.0.7", "ib0,mlx4_0:1,mlx4_0:2,mlx5_2:1"),
        ("10.3.0.7", "bond0,mlx5_bond_0:1"),
        ("0.0.0.0", None),
        ("::", None),
    ],
)
def test_the_interface_of_the_address_and_its_rdma_devices_and_no_other(
    sysfs: Path, address, devices
) -> None:
    assert net_devices_of(address, KNOWN, sysfs) == devices


def test_an_address_of_no_interface_is_refused_and_not_taken_for_all(sysfs: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no network interface of this machine has kv_host's address 10\.9\.9\.9"
    ):
        net_devices_of("10.9.9.9", KNOWN, sysfs)


def test_this_machine_has_its_loopback() -> None:
    assert ("lo", "127.0.0.1") in addresses_here()
    for host in ("127.0.0.1", "127.3.4.5", "::1", "localhost"):
        assert net_devices(host) == "lo"
    assert net_devices("0.0.0.0") is None
