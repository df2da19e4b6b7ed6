"""A conductor that says what it was told to: for what a real one says only when something is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CLUSTER = {
    "ready": True,
    "policy": "paper",
    "instances": [
        {
            "id": "prefill-0",
            "role": "prefill",
            "node": "node-p0",
            "state": "ready",
            "load": {"queued": 3, "queued_tokens": 700, "total_blocks": 64, "room_blocks": 0},
        },
        {
            "id": "decode-0",
            "role": "decode",
            "node": "node-d0",
            "state": "suspected",
            "load": {"total_blocks": 64, "room_blocks": 60},
        },
    ],
    "agents": [
        {
            "id": "node-p0",
            "code": "178cce17ca419c91",
            "node": "node-p0",
            "slots": 100,
            "used": 25,
            "slot_bytes": 1 << 20,
            "held": {"store_leases": 2.0, "store_connections": 1.0},
            "nics": [{"name": "rxe0", "state": "resting", "gid": "10.77.0.1 (RoCE v2, index 1)", "read": 5 << 20}],
            "ssd": {"state": "on", "blocks": 311, "bytes": 3 << 30, "capacity": 8 << 30, "read": 93, "read_rate": 2e9},
        }
    ],
    "index": {"synced": True, "lag_s": 0.25, "blocks": {"178cce17ca419c91": 42, "5763e050f2cc43a1": 1}, "applied": 50},
    "requests": {"running": 2, "accepted": 9, "rejected": 3, "failed": 0},
    "balance": {"prefill": {"busiest": 6, "mean": 4.0, "ratio": 1.5}, "decode": {}},
    "gateway": {"model": "tiny"},
}


def chunk(text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"choices": [], "usage": counts}


class FakeConductor(ThreadingHTTPServer):
    """``events`` are the data of the next streams; ``requests`` what was asked, with its headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[Any] = [chunk("Par"), chunk("is"), chunk("", "stop"), usage(20, 16, 2), "[DONE]"]
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answers: dict[str, tuple[int, dict[str, str], Any]] = {
            "/v1/models": (200, {}, {"data": [{"id": "tiny"}]}),
            "/cluster": (200, {}, CLUSTER),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeConductor

    def do_GET(self) -> None:
        self._note(None)
        self._answer(*self.server.answers.get(self.path, (404, {}, {"error": {"message": "no such route"}})))

    def do_POST(self) -> None:
        self._note(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.path in self.server.answers:
            self._answer(*self.server.answers[self.path])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in self.server.events:
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            self.wfile.write(f": a comment\ndata: {data}\n\n".encode())
            self.wfile.flush()

    def _note(self, body: Any) -> None:
        self.server.requests.append((self.path, dict(self.headers), body))

    def _answer(self, status: int, headers: dict[str, str], body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest's output is for tests."""


@contextmanager
def fake_conductor() -> Iterator[FakeConductor]:
    with FakeConductor() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
