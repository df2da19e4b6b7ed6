"""A whole mesh with a tiny model, as one types it: ready, answers, heals, stops, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.api import Api, ApiError
from cli.chat import Turn, ask
from cli.leftovers import leftovers
from cli.warden import marked
from shared.engines.tiny import make_tiny_model
from tests.cli.conftest import alive, eventually

pytestmark = [pytest.mark.mesh, pytest.mark.slow]

MOONCAKE = str(Path(sys.executable).with_name("mooncake"))
WORDS = "A prompt's cache depends on nothing after it, so a prefix computed once can be loaded again. " * 8


class Mesh:
    """A running ``mooncake up``: what it said when it was ready, and its process."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any]) -> None:
        self.process = process
        self.ready = ready
        self.api = Api(ready["url"], timeout=200)

    @property
    def mark(self) -> str:
        return str(self.ready["mesh_id"])

    def pid(self, service: str) -> int:
        """Of the (first) process of a service."""
        return next(pid for pid in sorted(marked(self.mark)) if f"services.{service}" in _command(pid))

    def say(self, text: str) -> Turn:
        messages = [{"role": "user", "content": text}]
        body = {"model": self.ready["model"], "messages": messages, "max_tokens": 12, "temperature": 0}
        return ask(self.api, body, lambda _text: None)

    def left(self) -> list[str]:
        """Processes, sockets and memory of this mesh."""
        processes = [f"{pid} {_command(pid)}" for pid in marked(self.mark)]
        return processes + [item.what for item in leftovers() if self.mark in item.what]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def mesh(model: Path, log: Path, *flags: str) -> Iterator[Mesh]:
    argv = [MOONCAKE, "up", "--json", "--port", "0", "--engine", "simulated", "--model", str(model), *flags]
    with (
        log.open("w") as lines,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=lines, text=True, start_new_session=True) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said, log.read_text()[-6000:]
            yield Mesh(process, json.loads(said))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(100)
            except subprocess.TimeoutExpired:
                process.kill()


def test_ready_then_answers_then_heals_then_stops_clean(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with mesh(tiny, log) as up:
        assert up.ready["ready"] is True and up.ready["model"] == "tiny" and up.ready["ready_s"] > 0
        cold = up.say(WORDS)
        warm = up.say(WORDS)
        assert cold.completion_tokens > 0 and warm.text == cold.text
        assert cold.cached_tokens == 0 and warm.cached_tokens >= 32
        _status_shows_it(up)
        _a_killed_process_comes_back(up, "decode", cold)
        _a_killed_process_comes_back(up, "prefill", cold)
        _environment_is_what_it_should_be(up)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(100) == 0, log.read_text()[-6000:]
        assert not up.left()
    assert "Traceback" not in log.read_text()


def _status_shows_it(up: Mesh) -> None:
    done = subprocess.run(
        [MOONCAKE, "status", "--json", "--url", up.api.url], capture_output=True, text=True, timeout=200, check=True
    )
    cluster = json.loads(done.stdout)
    assert sorted(instance["id"] for instance in cluster["instances"]) == ["decode-0", "prefill-0"]
    assert sorted(agent["id"] for agent in cluster["agents"]) == ["node-d0", "node-p0"]


def _a_killed_process_comes_back(up: Mesh, service: str, before: Turn) -> None:
    """The first request may meet the gap; what counts is that answers are the same again, without anybody's help."""
    pid = up.pid(service)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pid))

    def answers() -> bool:
        try:
            return up.say(WORDS).text == before.text
        except ApiError:
            return False

    assert eventually(answers)
    assert up.pid(service) != pid


def _environment_is_what_it_should_be(up: Mesh) -> None:
    """The secret is where it must be, and on no command line."""
    store = Path(f"/proc/{up.pid('store')}/environ").read_bytes().split(b"\0")
    secret = next(word.partition(b"=")[2] for word in store if word.startswith(b"MOONCAKE_SECRET=")).decode()
    assert len(secret) == 64
    assert not [pid for pid in marked(up.mark) if secret in _command(pid)]


def test_stores_talk_over_tls_and_nothing_survives_kill_nine_of_up(tiny: Path, tmp_path: Path) -> None:
    """Prompts travel from node to node over it; who has no certificate is not let in, and no key is left. Two
    conductors serve the port."""
    with mesh(tiny, tmp_path / "log", "--transport", "tcp", "--data-tls", "--conductors", "2") as up:
        _any_conductor_serves_any_request(up)
        assert up.say(WORDS).completion_tokens > 0 and up.say(WORDS).cached_tokens >= 32
        names = ("data_tls_cert", "data_tls_key", "data_tls_ca")
        files = [word for name in names for word in ("--" + name.replace("_", "-"), up.ready[name])]
        assert eventually(lambda: _verified(up, *files)["good"] >= 4)
        assert _verified(up)["good"] == 0
        assert up.ready["data_tls_cert"].startswith("/proc/") and up.left()
        up.process.kill()
        up.process.wait(100)
        assert eventually(lambda: not up.left()), up.left()
        assert not any(os.path.exists(up.ready[name]) for name in names)


def _any_conductor_serves_any_request(up: Mesh) -> None:
    """Every call opens a connection, and the kernel chooses whose it is."""
    who_knows_both: set[str] = set()

    def both_know_both() -> bool:
        cluster = up.api.get("/cluster")
        if sorted(one["id"] for one in cluster["conductors"]) == ["conductor-0", "conductor-1"]:
            who_knows_both.add(cluster["conductor"]["id"])
        return len(who_knows_both) == 2

    assert eventually(both_know_both)


def _verified(up: Mesh, *flags: str) -> Any:
    """What ``mooncake store verify`` reads from all agents."""
    env = dict(word.split("=", 1) for word in Path(f"/proc/{up.pid('store')}/environ").read_text().split("\0") if word)
    argv = [MOONCAKE, "store", "verify", "--json", "--transports", "require:tcp", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, env=env, check=False)
    return json.loads(done.stdout)


def test_the_second_ctrl_c_does_not_wait(tiny: Path, tmp_path: Path) -> None:
    with mesh(tiny, tmp_path / "log") as up:
        os.kill(up.pid("conductor"), signal.SIGSTOP)  # it will not stop by itself
        up.process.send_signal(signal.SIGINT)
        assert eventually(lambda: "stopping" in (tmp_path / "log").read_text())
        up.process.send_signal(signal.SIGINT)
        up.process.wait(100)
        assert eventually(lambda: not up.left()), up.left()
