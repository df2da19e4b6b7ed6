"""Children are started in order, started again when they die, stopped in order; nothing of theirs stays."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from cli import backoff
from cli.child import LONGEST_LINE, Child, exit_words
from cli.supervisor import CrashLoop, Supervisor
from cli.warden import marked
from shared.errors import ConfigError
from tests.cli.conftest import Heard, alive, python

STAY = "import time; print('up'); time.sleep(1000)"
POLITE = (
    "import signal,time,sys; signal.signal(15, lambda *a: (print('bye'), sys.exit(0))); print('up'); time.sleep(1000)"
)
STUBBORN = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(1000)"
PARENT = (
    "import subprocess,time; p = subprocess.Popen(['sleep', '1000'], start_new_session={detached});"
    "print('child', p.pid); time.sleep(1000)"
)


async def until(look: Callable[[], bool], seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
        while not look():
            await asyncio.sleep(0.02)


async def test_lines_are_heard_and_a_stop_is_polite(heard: Heard, mark: str) -> None:
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", POLITE, mark))
        await until(lambda: "up" in heard.said("a"))
    assert heard.said("a") == ["up", "bye"]
    assert not heard.events and not marked(mark)


async def test_later_stages_stop_first(heard: Heard, mark: str) -> None:
    async with Supervisor(mark, heard) as supervisor:
        for stage, name in enumerate(("first", "second", "third")):
            await supervisor.start(python(name, POLITE, mark, stage))
        await until(lambda: len(heard.lines) == 3)
    assert [name for name, text in heard.lines if text == "bye"] == ["third", "second", "first"]


async def test_who_does_not_stop_is_killed_after_its_grace(heard: Heard, mark: str) -> None:
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", STUBBORN, mark, grace=0.3))
        await until(lambda: "up" in heard.said("a"))
    assert "did not stop within 0.3 s" in heard.events[0][1]
    assert not marked(mark)


async def test_a_dead_child_is_started_again(heard: Heard, mark: str) -> None:
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", STAY, mark))
        await until(lambda: "up" in heard.said("a"))
        supervisor.settled()
        first = supervisor.children["a"].group
        os.kill(first, signal.SIGKILL)
        await until(lambda: heard.said("a") == ["up", "up"])
        assert supervisor.children["a"].group != first
        assert "was killed by SIGKILL; starting it again" in heard.events[0][1]


@pytest.mark.parametrize("detached", [False, True])
async def test_children_of_children_do_not_stay(heard: Heard, mark: str, detached: bool) -> None:
    """One that left the process group too."""
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", PARENT.format(detached=detached), mark))
        await until(lambda: bool(heard.said("a")))
        grandchild = int(heard.said("a")[0].split()[1])
        assert alive(grandchild)
    assert not alive(grandchild)


async def test_a_crash_loop_before_ready_ends_it_with_the_last_words(
    heard: Heard, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST", 0.01)
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", "print('my last words'); raise SystemExit(3)", mark))
        with pytest.raises(CrashLoop, match=r"a exited with code 3 at start 4(.|\n)*my last words"):
            await asyncio.wait_for(supervisor.broken(), 100)


async def test_a_crash_loop_after_ready_is_reported_and_retried(
    heard: Heard, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST", 0.01)
    async with Supervisor(mark, heard) as supervisor:
        supervisor.settled()
        await supervisor.start(python("a", "print('my last words'); raise SystemExit(3)", mark))
        await until(lambda: len(heard.events) > backoff.LOOP)
    assert any("times in a row" in text and "my last words" in text for _, text in heard.events)


async def test_a_refused_setting_is_not_tried_again(heard: Heard, mark: str) -> None:
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", "print('wrong --x'); raise SystemExit(2)", mark))
        with pytest.raises(CrashLoop, match=r"exited with code 2\. Its last words:\n *wrong --x"):
            await asyncio.wait_for(supervisor.broken(), 100)


async def test_what_cannot_be_started_is_a_clear_error(heard: Heard, mark: str) -> None:
    spec = python("a", "", mark)
    async with Supervisor(mark, heard) as supervisor:
        with pytest.raises(ConfigError, match="cannot start a"):
            await supervisor.start(type(spec)("a", ["/no/such/binary"], 0, {}))


async def test_the_second_wish_to_stop_kills(heard: Heard, mark: str) -> None:
    async with Supervisor(mark, heard) as supervisor:
        await supervisor.start(python("a", STUBBORN, mark, grace=30))
        await until(lambda: "up" in heard.said("a"))
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        supervisor.kill()
        await asyncio.wait_for(stopping, 100)


async def test_long_lines_and_odd_bytes_do_not_stop_the_reading(heard: Heard, mark: str) -> None:
    code = (
        f"import sys; sys.stdout.buffer.write(b'x' * {3 * LONGEST_LINE} + b'\\nodd \\xff\\nno end'); sys.stdout.flush()"
    )
    child = Child(python("a", code, mark), heard.line)
    await child.start()
    assert await asyncio.wait_for(child.wait(), 100) == 0
    child.forget()
    said = heard.said("a")
    assert sum(len(line) for line in said if set(line) == {"x"}) == 3 * LONGEST_LINE
    assert said[-2:] == ["odd \ufffd", "no end"]


def test_exit_codes_in_words() -> None:
    assert exit_words(0) == "exited with code 0"
    assert exit_words(-9) == "was killed by SIGKILL"
    assert exit_words(-250) == "was killed by signal 250"
