"""Pages are there before the slots are used, and not many more than that."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from services.store import prefault
from services.store.memory import SlabMemory
from services.store.prefault import Prefault
from shared.blocks import Geometry

GEOMETRY = Geometry(block_size=16, layers=4, kv_heads=2, head_dim=32, dtype="float32")


@pytest.fixture
def memory() -> SlabMemory:
    return SlabMemory("test", 1000, GEOMETRY)


def resident(memory: SlabMemory) -> int:
    return os.stat(f"/proc/self/fd/{memory.fd}").st_blocks * 512


def run(memory: SlabMemory, *reached: int) -> Prefault:
    with ThreadPoolExecutor(1) as threads:
        pages = Prefault(memory, threads)
        for slots in reached:
            pages.reached(slots)
    return pages


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="the kernel cannot populate")
def test_pages_go_ahead_of_the_slots_in_use(memory: SlabMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "AHEAD", 100 * memory.stride)
    monkeypatch.setattr(prefault, "STEP", 7 * memory.stride)
    run(memory)
    assert resident(memory) == 100 * memory.stride
    run(memory, 50, 20)
    assert resident(memory) == 150 * memory.stride
    run(memory, 1000)
    assert resident(memory) == memory.size
    assert not any(memory.view)


def test_a_kernel_that_cannot_leaves_the_pages_to_the_first_touch(
    memory: SlabMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "_madvise", lambda *_: -1)
    assert run(memory, 10, 20).done == memory.size
    assert resident(memory) < mmap.PAGESIZE


class Later(Executor):
    """Keeps what is submitted until told to run it."""

    def __init__(self) -> None:
        self.works: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.works.append(lambda: fn(*args, **kwargs))
        return Future()


def test_a_slab_that_closes_meanwhile_ends_it(memory: SlabMemory) -> None:
    threads = Later()
    pages = Prefault(memory, threads)
    memory.close()
    for work in threads.works:
        work()
    assert pages.done == memory.size
