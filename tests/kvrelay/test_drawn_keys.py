"""Keys that a router or `kvrelay up` draws, and the files in which their own user finds them and
nobody else does.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from pathlib import Path

import pytest

from kvrelay import drawn_keys
from kvrelay.drawn_keys import drawn_key, stored_key

ROUTER = "http://127.0.0.1:8123"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the file, which is not there yet; nor is there another one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    return tmp_path / "kvrelay"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_in_a_file_for_its_user_alone_until_the_router_ends(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    before = os.umask(0)
    try:
        with drawn_key("admin", 8123) as key:
            assert len(key) >= 43
            assert (mode(folder), mode(folder / "admin-8123.key")) == (0o700, 0o600)
            assert [file.name for file in folder.iterdir()] == ["admin-8123.key"]
            for url in (
                ROUTER,
                "http://localhost:8123/",
                "http://[::1]:8123",
                "http://127.8.8.8:8123",
            ):
                assert stored_key("admin", url) == key
    finally:
        os.umask(before)
    assert list(folder.iterdir()) == []
    assert stored_key("admin", ROUTER) == ""
    assert str(folder / "admin-8123.key") in caplog.text
    assert key not in caplog.text


@pytest.mark.parametrize(
    "url",
    ["", "8123", "http://[::1", "http://127.0.0.1:8124", "http://10.0.0.1:8123", "http://127.0.0.1.evil:8123",
     "http://127.0.0.1:8123@evil", "http://localhost.:8123"],
)  # fmt: skip
def test_it_is_given_to_no_other_address(url: str, folder: Path) -> None:
    with drawn_key("admin", 8123):
        assert stored_key("admin", url) == ""


def test_each_start_draws_another_one_and_overwrites_what_a_killed_router_has_left(
    folder: Path,
) -> None:
    folder.mkdir(mode=0o700)
    stale = folder / "admin-8123.key"
    stale.write_text("stale\n")
    stale.chmod(0o600)
    with drawn_key("admin", 8123) as key:
        assert stored_key("admin", ROUTER) == key != "stale"
        with drawn_key("admin", 8124) as other:
            assert other != key
            assert stored_key("admin", "http://127.0.0.1:8124") == other
        assert stored_key("admin", ROUTER) == key


def test_the_nodes_key_of_a_port_is_another_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with drawn_key("admin", 8123) as key, drawn_key("nodes", 8123) as nodes_key:
        assert stored_key("nodes", ROUTER) == nodes_key != key == stored_key("admin", ROUTER)
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    with drawn_key("nodes", 8123) as nodes_key:
        assert nodes_key == ""
    assert "start it with KVRELAY_NODE_API_KEY" in caplog.text


def test_a_router_that_ends_leaves_the_file_of_the_one_that_took_its_port(folder: Path) -> None:
    first = drawn_key("admin", 8123)
    first.__enter__()
    with drawn_key("admin", 8123) as key:
        first.__exit__(None, None, None)
        assert stored_key("admin", ROUTER) == key


def test_a_stale_link_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "admin-8123.key").symlink_to(tmp_path / "elsewhere")
    assert stored_key("admin", ROUTER) == ""
    with drawn_key("admin", 8123) as key:
        assert stored_key("admin", ROUTER) == key
    assert not (tmp_path / "elsewhere").exists()


def refuses(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sorted(folder.iterdir()) if folder.is_dir() else None
    assert stored_key("admin", ROUTER) == ""
    with drawn_key("admin", 8123) as key:
        assert key == ""
    assert (sorted(folder.iterdir()) if folder.is_dir() else None) == before
    assert "closed" in caplog.text
    assert str(folder) in caplog.text
    assert "KVRELAY_ADMIN_KEY" in caplog.text


def test_a_folder_of_another_user_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with drawn_key("admin", 8123):
        pass
    (folder / "admin-8123.key").write_text("planted\n")
    (folder / "admin-8123.key").chmod(0o600)
    assert stored_key("admin", ROUTER) == "planted"
    monkeypatch.setattr(drawn_keys.os, "geteuid", lambda: os.getuid() + 1)
    refuses(folder, caplog)


@pytest.mark.parametrize("wide", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(
    wide: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    folder.chmod(wide)
    refuses(folder, caplog)


def test_a_folder_that_is_a_link_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    refuses(folder, caplog)


def test_a_folder_that_is_a_file_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("")
    refuses(folder, caplog)


def test_a_file_that_others_may_read_is_no_key(folder: Path) -> None:
    with drawn_key("admin", 8123):
        (folder / "admin-8123.key").chmod(0o644)
        assert stored_key("admin", ROUTER) == ""


def test_without_a_runtime_folder_it_is_in_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with drawn_key("admin", 8123) as key:  # a service
        assert mode(tmp_path / f"kvrelay-{os.geteuid()}") == 0o700
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "of the shell"))
        assert stored_key("admin", ROUTER) == key
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    with drawn_key("admin", 8123) as key:  # one that was removed
        assert stored_key("admin", ROUTER) == key


def test_who_tidies_temporary_folders_sees_that_it_is_in_use(folder: Path) -> None:
    with drawn_key("admin", 8123), drawn_key("admin", 8124):
        tidying = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(tidying, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(tidying)


def test_a_full_disk_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawn_keys.os, "rename", full)
    with drawn_key("admin", 8123) as key:
        assert key == ""
    assert list(folder.iterdir()) == []
    assert "No space left" in caplog.text
