"""Folders of processes that were killed are removed at the next start, and nobody else may open
logs.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.node import private_files
from kvrelay.node.private_files import ProcessFolder, open_log, private_folder
from kvrelay.wire.errors import ConfigError

_HOLD = """
import sys
from kvrelay.node.private_files import ProcessFolder
folder = ProcessFolder()
(folder.path / "engine").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /tmp, for this process and its children; the folder of our user in it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"kvrelay-{os.geteuid()}"


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def holding() -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _HOLD], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_process_leaves_its_folder_until_the_next_start_and_a_living_one_keeps_its_own(
    temporary: Path,
) -> None:
    (killed, dead), (living, kept) = holding(), holding()
    try:
        assert dead.parent == kept.parent == temporary
        assert mode(temporary) == mode(dead) == 0o700
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        assert (dead / "engine").exists()
        ours = ProcessFolder()
        assert sorted(temporary.iterdir()) == sorted([kept, ours.path])
        assert (kept / "engine").exists()
        ours.close()
        assert list(temporary.iterdir()) == [kept]
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_what_is_no_folder_of_ours_stays(temporary: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    temporary.mkdir()
    (temporary / "process-link").symlink_to(elsewhere)
    (temporary / "admin-8000.key").touch()
    (temporary / "others").mkdir()
    assert mode(temporary) == 0o777
    folder = ProcessFolder()
    assert mode(temporary) == 0o700
    folder.close()
    assert (elsewhere / "file").exists()
    assert sorted(each.name for each in temporary.iterdir()) == [
        "admin-8000.key",
        "others",
        "process-link",
    ]


def test_a_place_that_somebody_else_has_made_is_left_alone(
    temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    temporary.symlink_to(elsewhere)
    folder = ProcessFolder()
    assert folder.path.parent.parent == tmp_path
    assert folder.path.parent not in (temporary, elsewhere)
    assert mode(folder.path.parent) == mode(folder.path) == 0o700
    assert "is somebody else's" in caplog.text
    folder.close()
    assert set(tmp_path.iterdir()) == {temporary, elsewhere}
    assert not list(elsewhere.iterdir())


def test_without_any_place_it_is_said_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        ProcessFolder()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who starts at the same time took it for a dead one's: at first before it was opened,
    then after.
    """
    made, opened, lock = list[str](), list[str](), private_files._locked
    make = tempfile.mkdtemp

    def mkdtemp(**kwargs: object) -> str:
        made.append(make(**kwargs))  # type: ignore[call-overload]
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    def locked(folder: Path) -> int:
        descriptor = lock(folder)
        opened.append(str(folder))
        if len(opened) == 1:
            folder.rmdir()
        return descriptor

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(private_files, "_locked", locked)
    before = len(os.listdir("/proc/self/fd"))
    folder = ProcessFolder()
    assert [str(folder.path)] == made[2:]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_for_logs_and_the_logs_in_it_are_for_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    private_folder(folder)
    assert mode(folder) == mode(folder.parent) == 0o700
    for log in (folder / "new.log", folder / "old.log"):
        if log.name == "old.log":
            log.write_text("an earlier run\n")
            assert mode(log) == 0o666
        with os.fdopen(open_log(log), "ab") as file:
            file.write(b"a line\n")
        assert mode(log) == 0o600
    assert (folder / "old.log").read_text() == "an earlier run\na line\n"
    folder.chmod(0o755)
    private_folder(folder)
    assert mode(folder) == 0o700
    os.close(open_log(Path("/dev/null")))
    assert mode(Path("/dev/null")) == 0o666


def test_a_folder_that_others_use_too_is_not_closed_to_them(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "of_others").touch()
    with pytest.raises(
        ConfigError, match=r"log_dir .*/shared may be opened by others \(mode 0777\)"
    ):
        private_folder(shared)
    assert mode(shared) == 0o777
    private_folder(shared / "ours")
    shared.chmod(0o700)
    private_folder(shared)
    with pytest.raises(ConfigError, match=r"cannot make log_dir .*: "):
        private_folder(shared / "of_others")
