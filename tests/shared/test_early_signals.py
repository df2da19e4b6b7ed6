"""SIGTERM long before a process is up: the first one of a container, where the kernel takes no default action."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.engines.tiny import make_tiny_model

PATIENCE = 100.0
BY_SIGTERM = 128 + signal.SIGTERM
NOWHERE = ["--nats", "nats://127.0.0.1:9", "--redis", "redis://127.0.0.1:9/0"]
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


SERVICES = {name: ["-m", f"services.{name}", *NOWHERE] for name in ("conductor", "store", "prefill", "decode")}
COMMAND = ["-c", "from cli.main import main; main()", "model", "fetch"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def answer(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.load(response)
    finally:
        connection.close()


def can_be_first() -> bool:
    return (
        bool(shutil.which(NAMESPACE[0])) and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(not can_be_first(), reason="no process namespace can be made here (unshare --pid)")


class First:
    """A process that is the first one of a process namespace, started as in an image. ``pid`` is as seen from here."""

    def __init__(self, *argv: str, folder: Path) -> None:
        self._log = folder / "stderr"
        with self._log.open("wb") as log:
            self._unshare = subprocess.Popen(
                [*NAMESPACE, "env", "--block-signal=TERM,INT", sys.executable, "-P", *argv],
                env=os.environ | {"MOONCAKE_CACHE": str(folder)},
                stderr=log,
            )
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.until(lambda: children.read_text().split(), "a process")
        self.pid = int(children.read_text().split()[0])

    def until(self, condition: Callable[[], object], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert self._unshare.poll() is None, f"ended before there was {what}: {self.ended()}"
            assert time.monotonic() < until, f"no {what}"
            time.sleep(0.001)

    def blocked(self) -> bool:
        """By ``env``, or still so in what came after it; ``unshare``, before both, undoes what it blocks."""
        if Path(f"/proc/{self.pid}/comm").read_text().strip() == NAMESPACE[0]:
            return False
        status = Path(f"/proc/{self.pid}/status").read_text()
        mask = int(status.partition("SigBlk:")[2].split()[0], 16)
        return bool(mask >> (signal.SIGTERM - 1) & 1)

    def has_mapped(self, library: str) -> bool:
        return library in Path(f"/proc/{self.pid}/maps").read_text()

    def says(self, text: str) -> bool:
        return text in self._log.read_text()

    def ended(self) -> tuple[int, str]:
        return self._unshare.wait(PATIENCE), self._log.read_text()

    def told(self) -> tuple[int, str]:
        os.kill(self.pid, signal.SIGTERM)
        return self.ended()

    def close(self) -> None:
        self._unshare.kill()
        self._unshare.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., First]]:
    started: list[First] = []

    def begin(*argv: str) -> First:
        started.append(First(*argv, folder=tmp_path))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.mark.parametrize("argv", [*SERVICES.values(), COMMAND], ids=[*SERVICES, "mooncake"])
def test_before_the_first_line_of_it_has_run(start: Callable[..., First], argv: list[str]) -> None:
    one = start(*argv)
    one.until(one.blocked, "blocked signal")
    assert one.told() == (BY_SIGTERM, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_while_torch_is_imported(start: Callable[..., First], service: str, model: Path) -> None:
    """What loads cannot be stopped, and calibrating would take ten minutes: neither is waited for. Until then the
    process is alive, and not ready."""
    port = free_port()
    one = start(*SERVICES[service], "--model", str(model), "--calibrate-s", "600", "--metrics-port", str(port))
    one.until(lambda: one.has_mapped("libtorch"), "torch")
    assert answer(port, "/health") == (200, {"status": "ok"})
    assert answer(port, "/ready") == (503, {"ready": False, "reasons": ["starting"]})
    code, errors = one.told()
    assert code == 0
    assert "stopped before it was ready" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("service", "flags", "line"),
    [
        ("conductor", ["--model-wait-s", "600", "--port", "0"], "waiting for the model"),
        ("store", ["--socket", "@first-process", "--pool-bytes", "1MiB"], "agent is up"),
    ],
)
def test_while_it_waits_for_others(start: Callable[..., First], service: str, flags: list[str], line: str) -> None:
    one = start(*SERVICES[service], *flags)
    one.until(lambda: one.says(line), "such line")
    code, errors = one.told()
    assert code in (0, BY_SIGTERM)
    assert "Traceback" not in errors
