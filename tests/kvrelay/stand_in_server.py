"""A stand-in for nodes and router: /health, /v1/models and one streamed answer. Usage:
stand_in_server.py PORT.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvrelay.node.process import die_with_parent

WORDS = ("A", " cache", " of", " keys", " and", " values.")


class StandIn(BaseHTTPRequestHandler):
    """Speaks just enough of the OpenAI protocol."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "stand-in"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        """One streamed chat; "break" breaks it off, "refuse" refuses it, "think" has reasoning."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body.keys() == {"model", "messages", "stream"}  # every server knows these
        question = body["messages"][-1]["content"]
        if question == "refuse":
            self._send(b'{"error": {"message": "not today"}}', "application/json", 429)
            return
        events = [
            {"choices": [{"delta": {"content": word}}]}
            for word in (*WORDS, f" ({len(body['messages'])})")
        ]
        if question == "think":
            events = [
                {"choices": [{"delta": {"reasoning": word}}]} for word in ("Let me", " see.")
            ] + events
        if question == "break":
            events = [*events[:1], {"error": {"message": "node lost"}}]
        events.append({"choices": [], "usage": {"completion_tokens": 7}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(
            "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n"]).encode(), "text/event-stream"
        )

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing: the test's output is not for access logs."""


if __name__ == "__main__":
    die_with_parent()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), StandIn).serve_forever()
