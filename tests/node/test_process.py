"""A process of ours: how it starts, logs, ends, and how many files it may have open."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_doubles import cpu_s

from kvrelay.node import process as node_process
from kvrelay.node.process import (
    MAX_QUEUED_LINES,
    describe_exit,
    open_log,
    private_folder,
    python_command,
    raise_file_limit,
)
from kvrelay.wire.errors import ConfigError
from tests.commands import output_of

DEADLINE_S = 30.0
ASK = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_MODULE = """
import gc
import sys

from kvrelay.node.process import freeze_imports

while_importing = gc.isenabled()


def main():
    freeze_imports()
    print(while_importing, gc.isenabled(), gc.get_freeze_count() > 1000, *sys.argv[1:])
"""


def test_the_collector_passes_over_what_was_imported(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "started_so.py").write_text(_MODULE, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(repository)])}
    told = output_of(*python_command("started_so"), "ENDPOINT", env=env)
    assert told.split() == ["False", "True", "True", "ENDPOINT"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "killed, probably out of memory"),
        (-11, "SIGSEGV"),
        (0, "exit code 0"),
        (2, "exit code 2"),
    ],
)
def test_how_a_process_ended_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


LINES = MAX_QUEUED_LINES + 5000
TALKATIVE = f"""
import logging, os, sys
from kvrelay.node.process import exit_now, log_to_stderr
log_to_stderr("node")
for at in range({LINES}):
    logging.info("line %d", at)
"""


def test_a_process_goes_on_while_nobody_reads_its_log_and_tells_what_it_left_out(
    repository: Path,
) -> None:
    code = TALKATIVE + "os.write(1, b'here'); sys.stdin.read(1); logging.info('the last one')"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=repository,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"here"  # a pipe takes 64 KiB and this was 500
        _, told = child.communicate(b"x", timeout=60)
    finally:
        child.kill()
        child.wait(10)
    lines = told.decode().splitlines()
    written = [line for line in lines if " line " in line]
    left_out = [int(line.split()[0]) for line in lines if "are left out" in line]
    assert len(written) + sum(left_out) in (LINES, LINES + 1)  # the last one may be among them
    assert "line 0" in written[0]
    assert sum(left_out) > 0


def test_the_end_of_a_process_does_not_wait_long_for_its_log(repository: Path) -> None:
    ours, theirs = os.pipe()
    try:
        command = [sys.executable, "-c", TALKATIVE + "exit_now(3)"]
        assert subprocess.Popen(command, stderr=theirs, cwd=repository).wait(60) == 3
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.fixture
def usual() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("most", [1 << 20, 300])
def test_the_soft_limit_becomes_the_hard_one_or_a_million(
    most: int, usual: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "_MAX_OPEN_FILES", most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, usual[1]))
    raise_file_limit()
    hard = usual[1] if usual[1] != resource.RLIM_INFINITY else most
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, most), usual[1])
    monkeypatch.setattr(node_process, "_MAX_OPEN_FILES", 200)
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, most), "never lowered"


def said(client: socket.socket) -> bytes:
    client.settimeout(DEADLINE_S)
    answer = b""
    with contextlib.suppress(ConnectionError):
        client.sendall(ASK)
        while more := client.recv(4096):
            answer += more
    return answer


def test_a_server_whose_clients_take_its_files_says_so_once_and_goes_on(tmp_path: Path) -> None:
    """64 files: 32 are for whatever an answer needs, and no connection is left without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def dial() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)

    def until_served() -> None:
        until, answer = time.monotonic() + DEADLINE_S, b""
        while not answer.startswith(b"HTTP/1.1 200 "):
            assert time.monotonic() < until
            with contextlib.suppress(OSError), dial() as client:
                answer = said(client)

    server = [sys.executable, str(Path(__file__).with_name("files_server.py")), str(port)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(server, stderr=log) as process:
        try:
            until_served()
            for _ in range(2):
                clients = [dial() for _ in range(150)]
                with dial() as late:
                    answer = said(late)
                assert answer.startswith(b"HTTP/1.1 503 "), answer
                assert b"half of the 64 files" in answer
                began = cpu_s(process.pid)
                time.sleep(0.5)  # idle with all of them open
                assert cpu_s(process.pid) - began < 0.25, "it spins"
                assert said(clients[0]).startswith(b"HTTP/1.1 200 "), (
                    "those that came in are served"
                )
                assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) <= 34
                for client in clients:
                    client.close()
                until_served()
        finally:
            process.kill()
    (line,) = [
        line
        for line in (tmp_path / "log").read_text().splitlines()
        if "files that this process" in line
    ]
    assert "refused connections=1 " in line


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("no_umask")
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


@pytest.mark.usefixtures("no_umask")
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
