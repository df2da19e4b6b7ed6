"""Faults of real processes under a real stream: the text goes on where it stopped, equal to a single process's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.mesh.conftest import Alone, alone, runner, tiny, tokens, up
from tests.mesh.mesh import Mesh

__all__ = ["alone", "runner", "tiny", "tokens", "up"]  # fixtures

pytestmark = [pytest.mark.mesh, pytest.mark.chaos]
LENGTH = 250


def instances(mesh: Mesh, role: str) -> dict[str, int]:
    """Id -> pid of those that live."""
    return {i["id"]: i["pid"] for i in mesh.cluster()["instances"] if i["role"] == role and i["state"] == "alive"}


async def complete(mesh: Mesh) -> None:
    """All instances are there, and nobody else: what died was started again by the supervisor."""
    async with asyncio.timeout(200):
        while [i["state"] for i in mesh.cluster()["instances"]] != ["alive"] * 4:
            await asyncio.sleep(0.2)


async def holder(mesh: Mesh, role: str) -> int:
    """The pid of the instance of that role that holds an attempt now."""
    async with asyncio.timeout(100):
        while True:
            pages = await asyncio.to_thread(mesh.scrapes)
            for id, pid in (await asyncio.to_thread(instances, mesh, role)).items():
                page = pages[f"{role} {id}"]
                if f'mooncake_held{{kind="{role}_attempts"}} 1' in page:
                    return pid


@pytest.mark.parametrize(
    ("role", "how"), [("decode", signal.SIGKILL), ("decode", signal.SIGSTOP), ("prefill", signal.SIGKILL)]
)
async def test_an_instance_fails_under_a_request(
    up: Callable[..., Mesh], alone: Alone, tokens: Callable[[int], list[int]], role: str, how: signal.Signals
) -> None:
    mesh = up("--prefill", "2", "--decode", "2")
    await complete(mesh)
    prompt = tokens(70 if role == "decode" else 1500)
    before = mesh.cluster()["requests"]["retried"]
    asking = asyncio.ensure_future(mesh.ask(prompt, stream=True, max_tokens=LENGTH if role == "decode" else 8))
    pid = await holder(mesh, role)
    os.kill(pid, how)
    try:
        answer = await asking
    finally:
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert not answer.error
    assert answer.text == alone(prompt, LENGTH if role == "decode" else 8)
    assert mesh.cluster()["requests"]["retried"] == before + 1
    await complete(mesh)
    assert await mesh.settled(14.0) == {}
