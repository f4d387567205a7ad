"""A Hugging Face Hub on this machine: the few routes that downloads use, over real HTTP, with
faults on demand.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

BRANCH = "main"


@dataclass
class Repository:
    """Files by name, at one or several revisions."""

    files: dict[str, bytes]
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    token: str = ""
    """Without this one a private repository does not exist, and a gated one gives no files."""

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files) of a branch, a tag or a commit."""
        for name, files in {BRANCH: self.files, **self.revisions}.items():
            commit = sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        return None


@dataclass
class FakeHub:
    """What tests set, and what was asked for."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    broken: int = 0
    """A status with which everything is answered, if not 0."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(method, file) of each request for a file."""

    def downloaded(self) -> list[str]:
        """Files whose content was asked for, in order."""
        return [file for method, file in self.asked if method == "GET"]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A server on a free port, in threads of this process."""
    hub = FakeHub()

    class Handler(_Handler):
        shared = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement
    shared: FakeHub

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing: pytest shows what is printed."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.shared.broken:
            return self._send(self.shared.broken, b"broken")
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4], parts[5])
        if len(parts) > 4 and parts[2] == "resolve":
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self._send(404, b"")

    def _repository(
        self, name: str, revision: str
    ) -> tuple[Repository, str, dict[str, bytes]] | None:
        """The repository at a revision; None after an error was sent."""
        repository = self.shared.repositories.get(name)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given == "broken-token":
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (
            repository.token and not repository.gated and given != repository.token
        ):
            self._send(
                401,
                b"",
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
            )
        elif (found := repository.at(revision)) is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return repository, *found
        return None

    def _api(self, name: str, what: str, revision: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return None
        _, commit, files = found
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        if what == "revision":
            value: object = {
                "id": name,
                "modelId": name,
                "sha": commit,
                "siblings": [],
                "tags": [],
                "private": False,
            }
        else:
            value = entries
        return self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, path: str) -> None:
        self.shared.asked.append((self.command, path))
        if (found := self._repository(name, revision)) is None:
            return None
        repository, commit, files = found
        if repository.gated and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Repo-Commit": commit})
        if path not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = files[path]
        etag = sha256(content).hexdigest()
        return self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
