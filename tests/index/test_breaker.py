"""The mass-expiry breaker: whom it spares, against a model that knows which agents live."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.answering import answers
from shared.index import code
from shared.index.breaker import ASK_AGAIN, SILENCE, Breaker
from shared.messages import Ref
from shared.records import AgentRecord
from shared.registration import TTL
from tests.examples import examples


def agent(number: int, incarnation: int = 0) -> AgentRecord:
    ref = Ref(f"a{number}", 1000 * number + incarnation + 1)
    return AgentRecord(ref=ref, node="n", code=code(ref.incarnation), host="10.0.0.1", port=7000 + number, host_id="h")


AGENTS = [agent(number) for number in range(6)]


def codes(*numbers: int) -> frozenset[bytes]:
    return frozenset(AGENTS[number].code for number in numbers)


def after(*looks: tuple[float, list[AgentRecord]]) -> Breaker:
    breaker = Breaker()
    for now, registered in looks:
        breaker.look(registered, now)
    return breaker


def test_three_of_five_at_once_are_spared() -> None:
    breaker = after((0, AGENTS[:5]), (1, AGENTS[3:5]))
    assert (breaker.spared, breaker.tripped) == (codes(0, 1, 2), 1)


@pytest.mark.parametrize(("all", "left"), [(5, 3), (6, 3), (2, 0), (1, 0)])
def test_few_or_not_most_of_them_are_not(all: int, left: int) -> None:
    assert after((0, AGENTS[:all]), (1, AGENTS[:left])).spared == codes()


def test_one_after_the_other_within_a_ttl_is_at_once() -> None:
    looks = [(2.0 * n, AGENTS[n:5]) for n in range(4)]
    assert after(*looks).spared == codes(0, 1, 2)


def test_one_after_the_other_over_more_than_a_ttl_is_not() -> None:
    looks = [((TTL - 1) * n, AGENTS[n:5]) for n in range(6)]
    assert after(*looks).spared == codes()


def test_while_it_is_tripped_whoever_vanishes_is_spared() -> None:
    breaker = after((0, AGENTS[:5]), (1, AGENTS[3:5]), (40, AGENTS[4:5]))
    assert (breaker.spared, breaker.tripped) == (codes(0, 1, 2, 3), 1)


def test_who_is_registered_again_is_spared_no_longer() -> None:
    breaker = after((0, AGENTS), (1, []), (2, AGENTS[:4]))
    assert breaker.spared == codes(4, 5)


def test_who_is_replaced_is_spared_no_longer() -> None:
    """By a new incarnation of its id, or by whoever listens at its address now."""
    other = AgentRecord(ref=Ref("z", 9), node="n", code=code(9), host="10.0.0.1", port=7001, host_id="h")
    breaker = after((0, AGENTS), (1, []), (2, [agent(0, incarnation=5), other]))
    assert breaker.spared == codes(2, 3, 4, 5)


def test_who_answers_is_kept_and_who_is_silent_is_not() -> None:
    breaker = after((0, AGENTS[:4]), (1, []))
    for now in range(1, 200):
        breaker.look([], now)
        for record in breaker.due(now):
            if record is AGENTS[0]:
                breaker.answered(record.code, now)
            else:
                breaker.silent(record.code)
        assert breaker.spared == (codes(0, 1, 2, 3) if now - 1 < SILENCE else codes(0))
    assert breaker.tripped == 1


def test_everybody_spared_is_asked_now_and_then() -> None:
    breaker = after((0, AGENTS), (1, []))
    asked = [(now, record.ref.id) for now in range(1, 13) for record in breaker.due(now)]
    assert sorted(asked) == [(now, f"a{n}") for now in (1, 1 + ASK_AGAIN, 1 + 2 * ASK_AGAIN) for n in range(6)]


def test_nobody_is_silent_who_was_not_asked() -> None:
    """This process stood still, or could not ask so many at once."""
    breaker = after((0, AGENTS), (1, []), (1000, []))
    assert breaker.spared == codes(*range(6))


class Mesh(RuleBasedStateMachine):
    """Agents live or not; the registry shows the living that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker()
        self.alive = {number: agent(number) for number in range(5)}
        self.cut: set[int] = set()
        self.died: dict[bytes, float] = {}
        self.births = 0
        self.shown: set[bytes] = set()
        self.vanished: dict[bytes, float] = {}
        self.look()

    def look(self) -> None:
        registered = [record for number, record in self.alive.items() if number not in self.cut]
        self.breaker.look(registered, self.now)
        now_shown = {record.code for record in registered}
        for gone in self.shown - now_shown:
            self.vanished[gone] = self.now
        for back in now_shown:
            self.vanished.pop(back, None)
        self.shown = now_shown

    @rule(number=st.integers(0, 4))
    def cut_off(self, number: int) -> None:
        self.cut.add(number)

    @rule()
    def cut_all_off(self) -> None:
        self.cut = set(range(5))

    @rule(number=st.integers(0, 4))
    def reach(self, number: int) -> None:
        self.cut.discard(number)

    @rule(number=st.integers(0, 4))
    def die(self, number: int) -> None:
        if number in self.alive:
            self.died[self.alive.pop(number).code] = self.now

    @rule(number=st.integers(0, 4))
    def start(self, number: int) -> None:
        """A new incarnation: it can only begin where it reaches the registry."""
        self.births += 1
        if number in self.alive:
            self.died[self.alive[number].code] = self.now
        self.alive[number] = agent(number, self.births)
        self.cut.discard(number)

    @rule(seconds=st.sampled_from([0.5, 5.0, TTL, SILENCE / 2, SILENCE, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        """In eight looks; data ports answer at once."""
        for _ in range(8):
            self.now += seconds / 8
            self.look()
            living = {record.code for record in self.alive.values()}
            for record in self.breaker.due(self.now):
                if record.code in living:
                    self.breaker.answered(record.code, self.now)
                else:
                    self.breaker.silent(record.code)

    @invariant()
    def registered_ones_are_not_spared(self) -> None:
        assert not self.breaker.spared & self.shown

    @invariant()
    def whoever_lives_and_was_spared_is_kept(self) -> None:
        """Of a mass expiry none that lives is ever given up, however long it lasts (asked often enough)."""
        living = {record.code for record in self.alive.values()}
        lately = {gone for gone, at in self.vanished.items() if self.now - at < TTL}
        massive = len(lately) >= 3 and len(lately) > (len(lately) + len(self.shown)) / 2
        if massive and self.breaker.spared:
            assert (lately & living) <= self.breaker.spared | self.shown

    @invariant()
    def the_dead_do_not_stay(self) -> None:
        for code_, at in self.died.items():
            assert code_ not in self.breaker.spared or self.now - at <= SILENCE + 4 * 1000.0 / 8


TestMesh = pytest.mark.timeout(300)(Mesh.TestCase)
TestMesh.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


# -- asking ------------------------------------------------------------------------------------------------


async def test_whoever_closes_or_complains_answers() -> None:
    def reacting(how: Callable[[asyncio.StreamWriter], None]) -> object:
        async def served(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            how(writer)
            writer.close()

        return served

    for how in (lambda w: w.close(), lambda w: w.write(b"what?"), lambda w: w.transport.abort()):
        server = await asyncio.start_server(reacting(how), "127.0.0.1", 0)  # type: ignore[arg-type]
        assert await answers("127.0.0.1", server.sockets[0].getsockname()[1], 60)
        server.close()


async def test_nobody_and_the_stopped_do_not_answer() -> None:
    program = "import socket,sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
    program += "while True: s.accept()[0].close()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            assert await answers("127.0.0.1", port, 60)
            process.send_signal(signal.SIGSTOP)
            assert not await answers("127.0.0.1", port, 0.2)
        finally:
            process.kill()
    assert not await answers("127.0.0.1", port, 60)
