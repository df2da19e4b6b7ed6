"""Contenders as processes: they answer lines, an error is one row's alone, one that dies says what it said last."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers.lines import Child, Failed, cpu_seconds, series

CONTENDER = """
import asyncio, os, sys
from benchmarks.peers.lines import answer, own_stdout

lines = own_stdout()
print("a library says hello")

async def handle(request):
    if request["op"] == "break":
        raise ValueError("no such thing")
    if request["op"] == "die":
        sys.stderr.write("out of memory\\n")
        sys.stderr.flush()
        os._exit(3)
    return {"got": request["op"]}

asyncio.run(answer(handle, lines, {"pids": [os.getpid()]}))
"""


def child(tmp_path: Path, code: str = CONTENDER) -> Child:
    return Child([sys.executable, "-c", code], {}, tmp_path / "log")


def test_lines_are_answered_and_what_is_printed_besides_goes_to_the_log(tmp_path: Path) -> None:
    contender = child(tmp_path)
    try:
        assert contender.ready == {"pids": [contender.pid]}
        assert contender.ask(op="read") == {"got": "read"}
        assert contender.ask(op="break") == {"error": "ValueError: no such thing"}
        assert contender.ask(op="write") == {"got": "write"}
    finally:
        contender.close()
    contender.close()
    assert "a library says hello" in (tmp_path / "log").read_text()


def test_a_contender_that_dies_says_what_it_said_last(tmp_path: Path) -> None:
    contender = child(tmp_path)
    try:
        with pytest.raises(Failed, match="ended with 3: out of memory"):
            contender.ask(op="die")
        with pytest.raises(Failed):
            contender.ask(op="read")
    finally:
        contender.close()


def test_a_contender_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="ended with 1: ImportError: no libibverbs"):
        child(tmp_path, "raise ImportError('no libibverbs')")


async def test_a_series_counts_calls_and_cpu_time_of_its_processes() -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        sum(range(100_000))

    found = await series(call, 0.0, [os.getpid()], least=5)
    assert found["calls"] == calls == 5 and found["cpu"] > 0 and found["seconds"] <= found["p99"]
    found = await series(lambda: asyncio.sleep(0), 60.0, [os.getpid()], most=3)
    assert found["calls"] == 3
    assert cpu_seconds([os.getpid()]) > 0
