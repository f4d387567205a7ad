"""A router as clients would see it in front of a model that calls tools of its own accord.

A model of a test is too small for that. So what passes here is as the client sent it, but for one
field: `structured_outputs`, which holds the model to what a larger one would write.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

ASKING_S = 120.0
FREE = (None, "auto", {"type": "auto"})
ANSWER = "Hello! How can I help you today?"


def held(body: dict[str, Any], calls: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Add what the model is to write to a request's body, if the request leaves it to the model.

    `calls`: arguments by name of tool. Without tools, and when they have answered, it says hello.
    """
    if body.get("tool_choice") not in FREE or body.get(
        "response_format", body.get("output_config")
    ):
        return body
    last = (body.get("messages") or body.get("input"))[-1]
    answered = isinstance(last, dict) and (
        last.get("role") == "tool" or last.get("type") == "function_call_output"
    )
    tools = () if answered else body.get("tools") or ()
    names = [tool.get("function", tool)["name"] for tool in tools]
    calling = ({"name": name, "arguments": calls[name]} for name in names)
    written = (msgspec.json.encode(call).decode() for call in calling)  # each token costs a step
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    return body | {"structured_outputs": {"choice": [text or ANSWER]}}


@contextmanager
def held_model(router: str, calls: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Serve such a router in front of this one; yields its URL."""

    class Passing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._pass_on(json.dumps(held(json.loads(body), calls)).encode())

        def _pass_on(self, body: bytes) -> None:
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() != "content-length"
            }
            asking = http.client.HTTPConnection(router.removeprefix("http://"), timeout=ASKING_S)
            try:
                asking.request(self.command, self.path, body or None, headers)
                answer = asking.getresponse()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()  # HTTP/1.0: the connection ends with the answer
                while piece := answer.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()
            finally:
                asking.close()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
