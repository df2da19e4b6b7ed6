"""Deaths, lost messages, a bad bus: what the dispatcher makes good, and how fast."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import AttemptFailed, BusDown, Draining, Unavailable
from shared.memory_bus import Faults
from shared.messages import AnyMessage, Gone, LiveList, TokenBatch
from tests.dispatch.fakes import FakeDecode, expected
from tests.dispatch.world import World, ids

Play = Callable[..., None]


@pytest.mark.parametrize("after", [0, 1, 3, 11])
@pytest.mark.parametrize("victim", ["d", "p"])
def test_death_migrates_with_the_exact_text(play: Play, after: int, victim: str) -> None:
    async def scenario(world: World) -> None:
        g = world.generation()
        got: list[int] = []
        stream = world.dispatcher.generate(g)
        if after == 0:
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.02)
            kill(world, victim)
            got.append((await first).output.token)
        async for token in stream:
            got.append(token.output.token)
            if len(got) == after:
                kill(world, victim)
        assert got == expected(g)
        counts = world.dispatcher.cluster()["requests"]
        if victim == "d" and after < 11:
            assert counts["retried"] == counts["migrated"] == 1

    def kill(world: World, role: str) -> None:
        fake = world.serving(role)
        fake.kill()
        fake.held.clear()

    play(scenario, prefills=2, decodes=2)


def test_a_restarted_instance_is_another_one(play: Play) -> None:
    """With one instance a role: the new incarnation takes over where the old one died."""

    async def scenario(world: World) -> None:
        g, got = world.generation(), []
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 4:
                world.fakes["d0"].kill()
                await world.add(FakeDecode, "d0", incarnation=2)
        assert got == expected(g)

    play(scenario, prefills=1, decodes=1)


def test_an_attempt_that_an_instance_forgot_is_left(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.step_seconds = 0.5
        g, got = world.generation(), []
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 3:
                forget(world)
        assert got == expected(g)
        assert world.dispatcher.cluster()["requests"]["migrated"] == 1

    def forget(world: World) -> None:
        for fake in world.fakes.values():
            for id in list(fake.held):
                fake.forget(id)

    play(scenario)


def test_partition_is_noticed_within_the_bounds(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.step_seconds = 0.5
        g, got = world.generation(), []
        started = asyncio.get_running_loop().time()
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 3:
                world.network.partition(world.serving("d").ref.id)
        assert got == expected(g)
        assert asyncio.get_running_loop().time() - started < 25
        world.network.heal()
        await asyncio.sleep(3)
        assert {i["state"] for i in world.dispatcher.cluster()["instances"]} == {"alive"}

    play(scenario)


def test_a_lost_cancel_is_made_good_by_the_list(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.network.filter = lambda id, message: type(message).__name__ != "Cancel"
        stream = world.dispatcher.generate(world.generation(max_tokens=10_000))
        await anext(stream)
        await stream.aclose()
        assert any(fake.held for fake in world.fakes.values())
        await asyncio.sleep(4.5)
        assert not any(fake.held for fake in world.fakes.values())

    play(scenario)


KINDS = ["Submit", "Admit", "Accepted", "TokenBatch", "LandingRequest", "LandingGrant", "Start", "Ready", "LiveReply"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_any_first_message_is_made_good(play: Play, kind: str) -> None:
    async def scenario(world: World) -> None:
        lost: list[str] = []

        def lose_first(id: str, message: AnyMessage) -> bool:
            if type(message).__name__ != kind or lost:
                return True
            lost.append(kind)
            return False

        world.network.filter = lose_first
        g = world.generation()
        assert ids(await world.collect(g)) == expected(g)
        assert lost

    play(scenario)


def test_a_lost_only_token_is_asked_for(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.network.filter = lambda id, message: not isinstance(message, TokenBatch)
        g = world.generation(max_tokens=1)
        assert ids(await world.collect(g)) == expected(g)
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)


def test_all_pushed_tokens_lost_still_streams(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.network.filter = lambda id, message: not isinstance(message, TokenBatch)
        g = world.generation(max_tokens=30)
        assert ids(await world.collect(g)) == expected(g)

    play(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_bus_costs_time_and_nothing_else(play: Play, seed: int) -> None:
    async def scenario(world: World) -> None:
        requests = [world.generation(length=4 + i, max_tokens=1 + 3 * i, first=i) for i in range(8)]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [expected(g) for g in requests]

    play(scenario, seed=seed, faults=Faults(lose=0.08, duplicate=0.1, delay=0.3, longest=0.4), max_attempts=50)


@pytest.mark.parametrize("seed", range(3))
def test_repeats_and_reordering_alone_cause_no_retry(play: Play, seed: int) -> None:
    async def scenario(world: World) -> None:
        requests = [world.generation(length=4 + i, max_tokens=1 + i, first=i) for i in range(8)]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [expected(g) for g in requests]
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario, seed=seed, faults=Faults(duplicate=0.2, delay=0.5, longest=0.3))


def test_e3_streams_wait_for_the_bus_and_new_requests_do_not(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.step_seconds = 0.2
        g, got = world.generation(max_tokens=100), []
        stream = world.dispatcher.generate(g)
        for _ in range(5):
            got.append((await anext(stream)).output.token)
        world.network.stop()
        with pytest.raises(BusDown) as e:
            await world.collect(world.generation())
        assert e.value.retry_after_ms and "bus_down" in world.dispatcher.readiness().reasons
        asyncio.get_running_loop().call_later(30, world.network.start)
        async for token in stream:
            got.append(token.output.token)
        assert got == expected(g)
        counts = world.dispatcher.cluster()["requests"]
        assert counts["retried"] == 0 and world.dispatcher.readiness().ready

    play(scenario)


def test_a_bus_that_stays_away_ends_the_stream(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.step_seconds = 0.2
        stream = world.dispatcher.generate(world.generation(max_tokens=100))
        await anext(stream)
        world.network.stop()
        with pytest.raises(AttemptFailed):
            async for _ in stream:
                pass
        world.network.start()

    play(scenario)


@pytest.mark.parametrize("role", ["p", "d"])
def test_nobody_left_before_the_first_token_is_unavailable_not_broken(play: Play, role: str) -> None:
    """503 with a time: the client may come again. Nothing was sent that would be lost."""

    async def scenario(world: World) -> None:
        world.prefill_seconds = 5.0
        asking = asyncio.ensure_future(world.collect(world.generation()))
        await asyncio.sleep(0.5)
        world.fakes[f"{role}0"].kill()
        world.fakes[f"{role}0"].held.clear()
        with pytest.raises(Unavailable) as e:
            await asking
        assert e.value.retry_after_ms

    play(scenario, prefills=1, decodes=1)


def test_a_bus_that_stays_away_before_the_first_token_is_unavailable(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.prefill_seconds = 5.0
        asking = asyncio.ensure_future(world.collect(world.generation()))
        await asyncio.sleep(0.5)
        world.network.stop()
        with pytest.raises(BusDown) as e:
            await asking
        assert e.value.retry_after_ms
        world.network.start()

    play(scenario, prefills=1, decodes=1)


def test_a_stream_waits_for_the_only_decode_to_start_anew(play: Play) -> None:
    """Loading a model takes longer than a new request is kept waiting."""

    async def scenario(world: World) -> None:
        g, got = world.generation(), []
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 4:
                world.fakes["d0"].kill()
                asyncio.get_running_loop().call_later(
                    40, lambda: asyncio.ensure_future(world.add(FakeDecode, "d0", incarnation=2))
                )
        assert got == expected(g)

    play(scenario, prefills=1, decodes=1)


def test_draining_hands_over_and_does_not_count(play: Play) -> None:
    async def scenario(world: World) -> None:
        g, got, run = world.generation(max_tokens=30), [], None
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 5:
                run = world.dispatcher.mesh.runs[g.id]
                fake = world.serving("d")
                fake.draining = True
                fake.drop((g.id, 1))
                error = Draining("bye").to_wire()
                gone = Gone(sender=fake.ref, target=world.me, request=g.id, attempt=1, error=error)
                await fake.bus.send("conductor", gone)
        assert got == expected(g) and run and run.attempts.failures == 0 and run.attempts.number == 2
        await asyncio.sleep(1.5)
        assert sum(i["load"]["draining"] for i in world.dispatcher.cluster()["instances"]) == 1

    play(scenario)


def test_lists_are_numbered_and_name_the_attempts_from_when_they_are_sent(play: Play) -> None:
    async def scenario(world: World) -> None:
        seen: list[LiveList] = []

        def watch(id: str, message: AnyMessage) -> bool:
            if isinstance(message, LiveList) and id == "d0":
                seen.append(message)
            return not (id == "d0" and type(message).__name__ == "Admit")  # never accepted by admit

        world.network.filter = watch
        world.prefill_seconds = 2.5
        g = world.generation()
        await world.collect(g)
        await asyncio.sleep(2.1)
        numbers = [message.number for message in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        listed = [message.attempts for message in seen if message.attempts]
        assert listed and listed[0] == [(g.id, 1, False)]
        assert any((g.id, 1) in message.acked for message in seen) and not seen[-1].acked

    play(scenario, prefills=1, decodes=1)


def test_messages_for_another_incarnation_are_refused(play: Play) -> None:
    async def scenario(world: World) -> None:
        g = world.generation()
        stream = world.dispatcher.generate(g)
        await anext(stream)
        fake = world.fakes["p0"]
        old = world.me.__class__(world.me.id, 1)
        error = Draining("not for you").to_wire()
        gone = Gone(sender=fake.ref, target=old, request=g.id, attempt=1, error=error)
        await fake.bus.request("conductor", gone, 1.0)
        rest = [t async for t in stream]
        assert len(rest) == len(expected(g)) - 1
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)
