"""At the end of a process what is left of its spans goes out, if that is quick: no backend holds anybody up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import create_server

PATIENCE = 200
"""Seconds for a process to end that would never end, or hours later, if it waited for its backend."""

WORK = (
    "from shared import telemetry; from shared.config import CommonSettings\n"
    "telemetry.setup('store', CommonSettings())\n"
    "for i in range(3000):\n"
    "    with telemetry.tracer().start_as_current_span('x'): pass\n"
    "print('done')"
)
NEVER = {
    "OTEL_EXPORTER_OTLP_TIMEOUT": "100000",
    "OTEL_BSP_EXPORT_TIMEOUT": "100000000",
    "OTEL_BSP_SCHEDULE_DELAY": "1",
    "OTEL_BSP_MAX_QUEUE_SIZE": "600",
}
"""An exporter that waits a day for its backend, begins at once, and has room for a fifth of the spans."""


def begin(endpoint: str, **variables: str) -> subprocess.Popen[str]:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | variables
    return subprocess.Popen(
        [sys.executable, "-c", WORK], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def ends(child: subprocess.Popen[str]) -> bool:
    try:
        said, _ = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
        child.wait()
    return child.returncode == 0 and said.strip() == "done"


def test_no_dead_backend_holds_up_the_work_or_its_end() -> None:
    """One that accepts and never answers, over both protocols, and one that is not there."""
    with create_server(("127.0.0.1", 0), backlog=64) as silent, create_server(("127.0.0.1", 0)) as gone:
        deaf = f"http://127.0.0.1:{silent.getsockname()[1]}"
        refusing = f"http://127.0.0.1:{gone.getsockname()[1]}"
        gone.close()
        children = [
            begin(deaf, **NEVER),
            begin(deaf, OTEL_EXPORTER_OTLP_PROTOCOL="grpc", **NEVER),
            begin(refusing, **NEVER),
            begin(refusing, OTEL_EXPORTER_OTLP_PROTOCOL="grpc", **NEVER),
        ]
        assert [ends(child) for child in children] == [True] * 4


@contextmanager
def backend() -> Iterator[tuple[str, list[int]]]:
    """(endpoint, bytes of each batch that came)."""
    came: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not on the tests' stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()


def test_a_backend_that_answers_gets_what_was_left() -> None:
    with backend() as (endpoint, came):
        assert ends(begin(endpoint, OTEL_BSP_SCHEDULE_DELAY="100000000", OTEL_BSP_MAX_QUEUE_SIZE="10000"))
        assert came and sum(came) > 3000 * 16, "fewer bytes than the spans' ids alone take"
