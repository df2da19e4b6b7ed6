"""``mooncake store`` as one types it: an agent without an engine, looked into, used by scripts, stopped by Ctrl-C."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result

from cli.leftovers import leftovers
from cli.main import main
from cli.store_run import plan
from cli.warden import marked
from services.store.client import plain_namespace
from services.store.sync_client import SyncStoreClient
from tests.cli.conftest import eventually

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from cli.main import main; main(prog_name='mooncake')", "store"]
SPACE = plain_namespace("test", 4096)
KEYS = [hashlib.sha256(bytes([n])).digest()[:16] for n in range(20)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


class Running:
    """A ``mooncake store`` as the page starts it, for all of the page: what it said when ready, and its process."""

    def __init__(self) -> None:
        self.socket = "@mooncake-test-" + uuid4().hex[:12]
        argv = [*COMMAND, "--json", "--pool-bytes", "16MiB", "--socket", self.socket]
        self.process = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line)

    def ask(self, *argv: str) -> Result:
        return CliRunner().invoke(main, ["store", *argv, "--redis", self.ready["redis"]])

    def document(self, *argv: str) -> Any:
        return json.loads(self.ask(*argv, "--json").stdout)

    def script(self, code: str) -> str:
        """What a script prints that runs beside this store."""
        env = environment(MOONCAKE_SOCKET=self.socket)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(100)


@pytest.fixture(scope="module")
def store() -> Iterator[Running]:
    running = Running()
    try:
        with SyncStoreClient(running.socket, SPACE, timeout=100.0) as client:
            assert all(put.stored for put in client.put([(key, key * 200) for key in KEYS], 100.0))
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
        for pid in marked(running.ready["mesh_id"]):
            os.kill(pid, signal.SIGKILL)


def test_agents_namespaces_and_blocks_are_listed(store: Running) -> None:
    def listed() -> bool:
        (agent,) = store.document("ls")["agents"]
        blocks, spaces = agent["blocks"], agent["namespaces"]
        return bool(spaces) and blocks["dram"] == blocks["indexed"] == 20 and spaces[0]["bytes"] == 20 * 4096

    assert eventually(listed, 100.0), store.document("ls")
    assert store.ready["id"] in store.ask("ls").output


def test_a_block_and_an_agent_are_shown(store: Running) -> None:
    (place,) = store.document("stat", KEYS[0].hex())["places"]
    assert (place["agent"], place["tier"], place["size"], place["there"]) == (store.ready["id"], "dram", 3200, True)
    missing = store.ask("stat", "00" * 16)
    assert missing.exit_code == 1 and "no agent has it" in missing.output
    assert store.document("stat", "--agent", store.ready["id"][:8])["socket"] == store.socket


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stat", "xyz"], "32 hexadecimal digits"),
        (["stat"], "either a KEY or --agent"),
        (["stat", "--agent", "nobody"], "names 0 agents"),
        (["bench", "--size", "many"], "--size"),
        (["bench", "--concurrency", "0"], "at least 1"),
    ],
)
def test_what_is_not_understood_is_said(store: Running, argv: list[str], words: str) -> None:
    done = store.ask(*argv)
    assert done.exit_code != 0 and words in done.output and "Traceback" not in done.output


def test_all_blocks_are_good(store: Running) -> None:
    found = store.document("verify", "--transports", "require:tcp")
    assert (found["lost"], found["corrupt"], found["unread"]) == (0, 0, 0)
    assert found["good"] >= 20
    assert store.ask("verify").exit_code == 0


def test_throughput_is_measured_and_nothing_stays(store: Running) -> None:
    flags = ["--socket", store.socket, "--size", "4KiB", "--concurrency", "2", "--batch", "2", "--seconds", "0.05"]
    rows = store.document("bench", *flags)["rows"]
    assert [row["what"] for row in rows] == ["put", "get"] and all(row["bytes_per_s"] > 0 for row in rows)

    def cleared() -> bool:
        spaces = store.document("ls")["agents"][0]["namespaces"]
        return len(spaces) == 2 and spaces[1]["blocks"] == 0

    assert eventually(cleared, 100.0)


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_page_run_as_they_stand(store: Running, number: int) -> None:
    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert store.script(examples[number]).strip().endswith("done")


def test_settings_that_cannot_work_are_not_tried_again(store: Running) -> None:
    done = store.ask("run", "--socket", store.socket, "--pool-bytes", "1MiB")
    assert done.exit_code == 1 and "another agent has it; name another with --socket" in done.output
    assert "starting it again" not in done.output


@pytest.mark.parametrize("command", [["ls"], ["stat", "00" * 16], ["verify"]])
def test_without_a_redis_the_commands_say_where_to_find_it(command: list[str]) -> None:
    done = CliRunner().invoke(main, ["store", *command, "--redis", "redis://:pw@127.0.0.1:9/0"])
    assert done.exit_code == 1 and "no Redis answers at 127.0.0.1:9/0: Connection refused" in done.output
    assert "MOONCAKE_REDIS" in done.output and "pw" not in done.output


def test_what_an_agent_says_of_itself_is_for_people(store: Running) -> None:
    said = store.ask("stat", "--agent", store.ready["id"]).output
    assert "transports: shm,tcp" in said and not set("{}[]'") & set(said)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ssd-path", "/proc/no", "--ssd-bytes", "1GiB"], "--ssd-path: cannot keep files in /proc/no"),
        (["--pool-bytes", "900TiB"], "a pool of 900.0 TiB would not fit into memory"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(argv: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["store", "run", *argv])
    assert done.exit_code == 2 and words in done.output


def test_a_pool_is_for_several_namespaces_unless_somebody_says_otherwise() -> None:
    def slab(*argv: str) -> str:
        made = plan(["--pool-bytes", "64MiB", *argv])
        return f"{made.slab >> 20} {made.memory()}"

    assert slab() == "16 64.0 MiB of memory, 16.0 MiB for each namespace (--pool-bytes, --slab-bytes)"
    assert slab("--slab-bytes", "32MiB").startswith("32 64.0 MiB of memory, 32.0 MiB for each")
    assert "all of it for the first namespace" in slab("--slab-bytes", "0")


def test_a_redis_that_does_not_answer_is_said() -> None:
    done = CliRunner().invoke(main, ["store", "run", "--redis", "redis://u:pw@127.0.0.1:9/0"])
    assert done.exit_code == 2 and "no server answers at 127.0.0.1:9" in done.output and "pw" not in done.output


def test_flags_without_a_command_are_those_of_run() -> None:
    done = CliRunner().invoke(main, ["store", "--pool-byte", "1"])
    assert done.exit_code == 2 and "did you mean --pool-bytes?" in done.output
    assert "--pool-bytes" in CliRunner().invoke(main, ["store", "run", "--help"]).output


def test_ctrl_c_ends_it_in_good_order(store: Running) -> None:
    """The last one: there is no store afterwards."""
    assert store.stop() == 0
    mark, socket = store.ready["mesh_id"], store.socket
    assert eventually(lambda: not marked(mark), 100.0)
    assert not [item for item in leftovers() if socket in item.what or mark in item.what]
