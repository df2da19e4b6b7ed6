"""A handshake that ends after its agent has: nothing of it is admitted, and nothing stays open."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.store.transfer import server as server_module
from services.store.transfer.handshake import Hello, Role, respond
from services.store.transfer.metrics import TARGET
from services.store.transfer.rdma import messages
from services.store.transfer.rdma.messages import Connect
from services.store.transfer.rdma.queue_pair import Side
from shared.errors import NoTransport, PeerGone
from shared.messages import Ref
from tests.transfer.agents import Agent, World, read, until

SHAKING = "transfer-shake"


class Late:
    """The handshakes of one role with ``agent`` stop at ``when`` until ``gate`` is open."""

    def __init__(self, agent: Agent, role: Role, when: str) -> None:
        self._ref, self._role, self._when = agent.ref, role, when
        self.there, self.gate = threading.Event(), threading.Event()
        self.socks: list[socket.socket] = []

    def respond(
        self, sock: socket.socket, secret: bytes, ref: Ref, timeout: float, admit: Callable[[Hello], Any]
    ) -> Hello:
        def admitted(greeting: Hello) -> Any:
            self._stop("before it is admitted", ref, greeting, sock)
            return admit(greeting)

        greeting = respond(sock, secret, ref, timeout, admitted)
        self._stop("when it is over", ref, greeting, sock)
        return greeting

    def _stop(self, here: str, ref: Ref, greeting: Hello, sock: socket.socket) -> None:
        if (here, ref, greeting.role) == (self._when, self._ref, self._role):
            self.socks.append(sock)
            self.there.set()
            self.gate.wait(100)


@pytest.fixture
async def pair(tcp_world: World) -> AsyncIterator[tuple[Agent, Agent]]:
    yield await tcp_world.agent(), await tcp_world.agent(on_call=echo)


async def echo(_: Ref, payload: bytes) -> bytes:
    return payload


@pytest.mark.parametrize("when", ["before it is admitted", "when it is over"])
@pytest.mark.parametrize("role", [Role.DATA, Role.CONTROL])
async def test_nothing_stays_of_a_handshake_that_ends_after_its_agent(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch, role: Role, when: str
) -> None:
    a, b = pair
    late, streams = Late(b, role, when), TARGET._value.get()
    monkeypatch.setattr(server_module, "respond", late.respond)
    asking = asyncio.ensure_future(
        a.run([read(b.ref, 0, 0, 100)]) if role is Role.DATA else a.engine.call(b.ref, b"x", 100)
    )
    assert await asyncio.to_thread(late.there.wait, 100)
    closing = asyncio.create_task(b.engine.close())
    await until(lambda: b.engine._server._closed)
    late.gate.set()
    async with asyncio.timeout(100):
        await closing
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: not any(thread.name == SHAKING for thread in threading.enumerate()))
    await until(lambda: b.engine.connections() == 0 and all(sock.fileno() == -1 for sock in late.socks))
    await until(lambda: TARGET._value.get() == streams)
    assert not b.engine._server._attaching


def test_nothing_stays_of_a_handshake_that_ends_after_the_loop_of_its_agent() -> None:
    async def made() -> Agent:
        world = World("prefer:tcp")
        agent = await world.agent()
        await agent.engine.close()
        return agent

    agent = asyncio.run(made())
    ours, theirs = socket.socketpair()
    with theirs:
        agent.engine._server._begin(ours, Hello(1, Role.CONTROL, Ref("a", 1), agent.ref, b""), [])
        assert ours.fileno() == -1 and agent.engine.connections() == 0


async def test_no_queue_pair_is_made_once_rdma_is_closing(pair: tuple[Agent, Agent]) -> None:
    """A peer's call may come while the agent ends: its control connection goes last."""
    a, b = pair
    made: list[Any] = []

    class Target:
        async def answer(self, peer: Ref, call: Any) -> None:
            made.append(call)

        def close(self) -> None:
            """As the devices, too."""

    class Regions:
        async def close(self) -> None:
            """There are none."""

    rdma: Any = b.engine._rdma
    rdma._target, rdma._regions, rdma._hardware, rdma.why = Target(), Regions(), Target(), ""
    call = Connect(1, "mlx5_0", Side("::1", 2, 0, 1, 1, 4096, 1))
    await rdma.answer(a.ref, messages.pack(call))
    assert made == [call]
    await rdma.close(PeerGone("this agent is closing"))
    with pytest.raises(NoTransport, match="closing"):
        await rdma.answer(a.ref, messages.pack(call))
    assert made == [call]
