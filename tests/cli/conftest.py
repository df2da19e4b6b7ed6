"""Children to supervise, and a record of what was said about them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.child import Spec
from cli.leftovers import MARK
from cli.warden import marked


class Heard:
    """A report that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[tuple[str, str]] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def event(self, name: str, text: str, bad: bool = False) -> None:
        self.events.append((name, text))

    def said(self, name: str) -> list[str]:
        return [text for who, text in self.lines if who == name]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for this test's processes; whatever a failed test leaves of them is killed."""
    name = f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**8}"
    yield name
    for pid in marked(name):
        os.kill(pid, 9)


def python(name: str, code: str, mark: str, stage: int = 0, grace: float = 5.0) -> Spec:
    """A child that runs ``code``."""
    env = {MARK: mark, "PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    return Spec(name, [sys.executable, "-S", "-c", code], stage, env, grace)


def eventually(look: Callable[[], bool], seconds: float = 100.0) -> bool:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
