"""What decode waits for has a deadline of its own: it does not rely on anybody to cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from services.decode.settings import DecodeSettings
from shared.engines.base import LandingTarget, Owner, PoolClass, Run
from shared.errors import MooncakeError

QUIET = 5.0
OWNER = Owner("writer")


class Asked:
    """One attempt at a decode instance, listed as live for ever: granted a landing, which only we fill."""

    def __init__(self, kit: Any, mesh: Any) -> None:
        self.kit, self.mesh = kit, mesh
        self.peer = kit.peer("p", mesh)
        self.stream = self.peer.stream(mesh.decodes[0].ref)
        self.store = mesh.node("p")
        self.errors: list[MooncakeError] = []

    async def granted(self) -> None:
        key, dropped = (self.stream.request, self.stream.attempt), self.mesh.decodes[0].give_up
        self.mesh.gateway.streams[key] = self.stream
        self.stream.accepted.add(self.stream.decode.id)

        def give_up(key: Any, error: MooncakeError) -> None:
            self.errors.append(error)
            dropped(key, error)

        self.mesh.decodes[0].give_up = give_up
        grant = await self.peer.say("landing", self.stream, self.kit.tokens(20))
        self.target = LandingTarget(grant.agent, grant.token, grant.slots)
        self.source = await self.store.allocate(2, OWNER, PoolClass.PREFILL, 1.0)

    async def write(self, block: int, tokens: Sequence[int]) -> None:
        layers = self.mesh.namespace.layers
        runs = [Run(self.source[block].slot, block, 0, layers, token, token + 1) for token in tokens]
        await self.store.stream(self.target, runs, OWNER, 1.0)

    async def ends(self, after: float) -> None:
        """Not before ``after`` seconds from now, but soon then: nothing is held, and prefill is to blame."""
        await self.store.release(self.source)
        await asyncio.sleep(after - 0.5)
        assert self.mesh.held() and not self.errors
        await asyncio.sleep(2.0)
        assert not self.mesh.held() and self.stream.error == "deadline_exceeded"
        assert [(e.code, e.field) for e in self.errors] == [("deadline_exceeded", "prefill")]


def asked(kit: Any, then: Callable[[Asked], Awaitable[None]]) -> None:
    async def main() -> None:
        settings = DecodeSettings(headroom=0.0, landing_timeout_s=QUIET)
        async with kit.mesh(prefills=0, decode=settings) as mesh:
            attempt = Asked(kit, mesh)
            await attempt.granted()
            await then(attempt)

    kit.run(main())


def test_a_landing_of_which_nothing_more_comes_is_given_up(kit: Any) -> None:
    async def nothing(attempt: Asked) -> None:
        await attempt.ends(QUIET)

    async def a_drop_now_and_then(attempt: Asked) -> None:
        for token in range(4):
            await attempt.write(0, [token])
            await asyncio.sleep(0.8 * QUIET)
        await attempt.write(0, [4])
        await attempt.ends(QUIET)

    asked(kit, nothing)
    asked(kit, a_drop_now_and_then)


def test_a_prompt_that_has_landed_and_gets_no_first_token_is_given_up(kit: Any) -> None:
    async def everything(attempt: Asked) -> None:
        await attempt.write(0, range(16))
        await attempt.write(1, range(4))
        await attempt.ends(QUIET)

    asked(kit, everything)


@pytest.mark.parametrize("tokens", [1, 40])
def test_commits_that_do_not_end_hold_up_neither_answer_nor_slots(kit: Any, tokens: int) -> None:
    async def main() -> None:
        async with kit.mesh() as mesh:
            prompt, sampling = kit.tokens(32), kit.greedy(tokens)

            async def never(*_: Any, **__: Any) -> None:
                await asyncio.sleep(10_000)

            mesh.decodes[0].store.commit = never
            answer = await mesh.gateway.run(prompt, sampling)
            assert (answer.tokens, answer.attempts) == (mesh.expect(prompt, sampling), 1)
            await mesh.quiet(20.0)

    kit.run(main())


def test_the_tokens_of_a_landing_are_counted(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(prefills=0) as mesh:
            attempt = Asked(kit, mesh)
            await attempt.granted()
            store, layers = mesh.decodes[0].store, mesh.namespace.layers
            landing = mesh.nodes[0].landings[attempt.target.token].landing
            assert await store.missing(landing, 0.01) == 20 * layers
            await attempt.write(0, np.arange(7).tolist())
            assert await store.missing(landing, 0.01) == 13 * layers

    kit.run(main())
