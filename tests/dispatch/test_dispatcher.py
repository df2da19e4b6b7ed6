"""The dispatcher over the in-memory bus, with scripted instances, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.conductor.generation import Token
from shared.errors import (
    AttemptFailed,
    BusDown,
    Contended,
    DoesNotFit,
    Draining,
    InvalidInput,
    Unavailable,
)
from shared.memory_bus import Faults
from shared.messages import AnyMessage, Gone, LiveList, TokenBatch

Play = Callable[..., None]
Draws = Callable[[Any], list[int]]


def ids(tokens: list[Token]) -> list[int]:
    return [token.output.token for token in tokens]


def test_a_request_runs_through(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        g = world.generation()
        tokens = await world.collect(g)
        assert ids(tokens) == draws(g)
        assert [t.output.index for t in tokens] == list(range(12))
        assert tokens[-1].output.finish == "length" and tokens[0].usage and tokens[1].usage is None
        counts = world.dispatcher.cluster()["requests"]
        assert counts["retried"] == counts["migrated"] == 0

    play(scenario)


def test_a_request_of_one_token_ends_at_prefill(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        g = world.generation(max_tokens=1)
        assert ids(await world.collect(g)) == draws(g)
        await asyncio.sleep(0.5)
        assert not any(fake.held for fake in world.fakes.values())  # the cancel is the fast path

    play(scenario)


def test_many_at_once_do_not_cross_talk(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        requests = [world.generation(length=5 + i % 9, max_tokens=3 + i % 5, first=i) for i in range(40)]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [draws(g) for g in requests]
        for role in ("prefill", "decode"):
            assert world.dispatcher.cluster()["balance"][role]["ratio"] <= 1.5
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)


def test_the_same_id_twice_at_once_is_refused_and_free_again_afterwards(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        g = world.generation()
        first = asyncio.ensure_future(world.collect(g))
        await asyncio.sleep(0.02)
        with pytest.raises(Exception, match="in use"):
            await world.collect(g)
        assert ids(await first) == draws(g)

    play(scenario)


@pytest.mark.parametrize("id", ["p0", "d0"])
def test_a_refusal_means_choose_again(play: Play, draws: Draws, id: str) -> None:
    async def scenario(world: Any) -> None:
        world.fakes[id].refuse = 1
        requests = [world.generation(), world.generation()]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [draws(g) for g in requests]
        assert world.dispatcher.cluster()["requests"]["retried"] == 1

    play(scenario)


def test_a_refused_landing_avoids_decode_and_keeps_prefill(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        world.fakes["d0"].refuse_landing = 1
        g = world.generation()
        assert ids(await world.collect(g)) == draws(g)
        assert world.fakes["d1"].accepted == 1 and world.fakes["p0"].accepted == 2

    play(scenario, prefills=1)


def test_everybody_refuses_is_contended(play: Play) -> None:
    async def scenario(world: Any) -> None:
        for id in ("d0", "d1"):
            world.fakes[id].refuse = 100
        with pytest.raises(Contended) as e:
            await world.collect(world.generation())
        assert e.value.retry_after_ms > 0

    play(scenario)


def test_what_an_instance_says_of_the_input_is_final(play: Play) -> None:
    async def scenario(world: Any) -> None:
        async def refuse(message: AnyMessage) -> None:
            raise InvalidInput("no such thing", field="tokens")

        world.fakes["p0"].on_attempt = refuse
        with pytest.raises(InvalidInput) as e:
            await world.collect(world.generation())
        assert e.value.field == "tokens"
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario, prefills=1)


def test_what_fits_no_pool_is_refused_at_once(play: Play) -> None:
    async def scenario(world: Any) -> None:
        await asyncio.sleep(1.5)  # the first reports
        with pytest.raises(DoesNotFit):
            await world.collect(world.generation(length=9000, max_tokens=4))

    play(scenario)


@pytest.mark.parametrize("after", [0, 1, 3, 11])
@pytest.mark.parametrize("victim", ["d", "p"])
def test_death_migrates_with_the_exact_text(play: Play, draws: Draws, after: int, victim: str) -> None:
    async def scenario(world: Any) -> None:
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
        assert got == draws(g)
        counts = world.dispatcher.cluster()["requests"]
        if victim == "d" and after < 11:
            assert counts["retried"] == counts["migrated"] == 1

    def kill(world: Any, role: str) -> None:
        """The one that serves the request."""
        run = next(iter(world.dispatcher.mesh.runs.values()))
        placement = run.effort.placement
        id = placement.prefill.id if role == "p" else placement.decode.id
        world.fakes[id].kill()
        world.fakes[id].held.clear()

    play(scenario, prefills=2, decodes=2)


def test_a_restarted_instance_is_another_one(play: Play, draws: Draws, kinds: dict[str, Any]) -> None:
    """With one instance a role: the new incarnation takes over where the old one died."""

    async def scenario(world: Any) -> None:
        g, got = world.generation(), []
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 4:
                world.fakes["d0"].kill()
                await world.add(kinds["decode"], "d0", incarnation=2)
        assert got == draws(g)

    play(scenario, prefills=1, decodes=1)


def test_an_attempt_that_an_instance_forgot_is_left(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        world.step_seconds = 0.5
        g, got = world.generation(), []
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 3:
                forget(world)
        assert got == draws(g)
        assert world.dispatcher.cluster()["requests"]["migrated"] == 1

    def forget(world: Any) -> None:
        for fake in world.fakes.values():
            for id in list(fake.held):
                fake.held.pop(id).task.cancel()

    play(scenario)


def test_partition_is_noticed_within_the_bounds(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        world.step_seconds = 0.5
        g, got = world.generation(), []
        started = asyncio.get_running_loop().time()
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 3:
                cut = world.dispatcher.mesh.runs[g.id].effort.placement.decode.id
                world.network.partition(cut)
        assert got == draws(g)
        assert asyncio.get_running_loop().time() - started < 25
        world.network.heal()
        await asyncio.sleep(3)
        assert {i["state"] for i in world.dispatcher.cluster()["instances"]} == {"alive"}

    play(scenario)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_the_iterator_cancels_everywhere(play: Play, after: int) -> None:
    async def scenario(world: Any) -> None:
        world.prefill_seconds = 1.0
        stream = world.dispatcher.generate(world.generation(max_tokens=1000))
        if after == 0:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(after):
            await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.2)
        assert world.nothing_held()  # the fast path, not the list
        assert world.dispatcher.cluster()["requests"]["cancelled"] == 1

    play(scenario)


def test_a_lost_cancel_is_made_good_by_the_list(play: Play) -> None:
    async def scenario(world: Any) -> None:
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
def test_the_loss_of_any_first_message_is_made_good(play: Play, draws: Draws, kind: str) -> None:
    async def scenario(world: Any) -> None:
        lost: list[str] = []

        def lose_first(id: str, message: AnyMessage) -> bool:
            if type(message).__name__ != kind or lost:
                return True
            lost.append(kind)
            return False

        world.network.filter = lose_first
        g = world.generation()
        assert ids(await world.collect(g)) == draws(g)
        assert lost

    play(scenario)


def test_a_lost_only_token_is_asked_for(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        world.network.filter = lambda id, message: not isinstance(message, TokenBatch)
        g = world.generation(max_tokens=1)
        assert ids(await world.collect(g)) == draws(g)
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)


def test_all_pushed_tokens_lost_still_streams(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        world.network.filter = lambda id, message: not isinstance(message, TokenBatch)
        g = world.generation(max_tokens=30)
        assert ids(await world.collect(g)) == draws(g)

    play(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_bus_costs_time_and_nothing_else(play: Play, draws: Draws, seed: int) -> None:
    async def scenario(world: Any) -> None:
        requests = [world.generation(length=4 + i, max_tokens=1 + 3 * i, first=i) for i in range(8)]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [draws(g) for g in requests]

    play(scenario, seed=seed, faults=Faults(lose=0.08, duplicate=0.1, delay=0.3, longest=0.4), max_attempts=50)


@pytest.mark.parametrize("seed", range(3))
def test_repeats_and_reordering_alone_cause_no_retry(play: Play, draws: Draws, seed: int) -> None:
    async def scenario(world: Any) -> None:
        requests = [world.generation(length=4 + i, max_tokens=1 + i, first=i) for i in range(8)]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [draws(g) for g in requests]
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario, seed=seed, faults=Faults(duplicate=0.2, delay=0.5, longest=0.3))


def test_streams_wait_for_the_bus_and_new_requests_do_not(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
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
        assert got == draws(g)
        counts = world.dispatcher.cluster()["requests"]
        assert counts["retried"] == 0 and world.dispatcher.readiness().ready

    play(scenario)


def test_a_bus_that_stays_away_ends_the_stream(play: Play) -> None:
    async def scenario(world: Any) -> None:
        world.step_seconds = 0.2
        stream = world.dispatcher.generate(world.generation(max_tokens=100))
        await anext(stream)
        world.network.stop()
        with pytest.raises(AttemptFailed):
            async for _ in stream:
                pass
        world.network.start()

    play(scenario)


def test_attempts_are_bounded(play: Play, kinds: dict[str, Any]) -> None:
    async def scenario(world: Any) -> None:
        for fake in world.fakes.values():
            fake.refuse = 1000
        with pytest.raises(Contended):
            await world.collect(world.generation())
        assert sum(len(fake.dead) for fake in world.fakes.values()) <= 2 * 5

    play(scenario)


def test_draining_hands_over_and_does_not_count(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        g, got, run = world.generation(max_tokens=30), [], None
        async for token in world.dispatcher.generate(g):
            got.append(token.output.token)
            if len(got) == 5:
                run = world.dispatcher.mesh.runs[g.id]
                fake = world.fakes[run.effort.placement.decode.id]
                fake.draining = True
                fake.drop((g.id, 1))
                error = Draining("bye").to_wire()
                gone = Gone(sender=fake.ref, target=world.me, request=g.id, attempt=1, error=error)
                await fake.bus.send("conductor", gone)
        assert got == draws(g) and run and run.attempts.failures == 0 and run.attempts.number == 2
        await asyncio.sleep(1.5)
        assert sum(i["load"]["draining"] for i in world.dispatcher.cluster()["instances"]) == 1

    play(scenario)


def test_close_drains_then_cancels(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        short, long = world.generation(max_tokens=20), world.generation(max_tokens=100_000)
        ending = asyncio.ensure_future(world.collect(short))
        endless = asyncio.ensure_future(world.collect(long))
        await asyncio.sleep(0.1)
        closing = asyncio.ensure_future(world.dispatcher.close(drain=5.0))
        await asyncio.sleep(0.1)
        with pytest.raises(Unavailable, match="draining"):
            await world.collect(world.generation())
        assert ids(await ending) == draws(short)
        with pytest.raises(Draining):
            await endless
        await closing

    play(scenario)


def test_no_instance_is_unavailable(play: Play) -> None:
    async def scenario(world: Any) -> None:
        assert set(world.dispatcher.readiness().reasons) == {"no_prefill", "no_decode"}
        with pytest.raises(Unavailable):
            world.dispatcher.consider(10)
        with pytest.raises(Unavailable):
            _ = world.dispatcher.namespace
        with pytest.raises(Unavailable):
            await world.collect(world.generation())

    play(scenario, prefills=0, decodes=0)


def test_hopeless_requests_are_refused_before_tokenizing(play: Play) -> None:
    async def scenario(world: Any) -> None:
        world.dispatcher.consider(100)
        with pytest.raises(Contended) as e:
            world.dispatcher.consider(100, slo_ttft_ms=1)
        assert e.value.retry_after_ms >= 0

    play(scenario)


def test_an_objective_that_would_be_missed_is_refused_with_a_time(play: Play) -> None:
    async def scenario(world: Any) -> None:
        world.prefill_seconds = 1.0
        busy = [asyncio.ensure_future(world.collect(world.generation(first=i))) for i in range(6)]
        await asyncio.sleep(0.2)
        with pytest.raises(Contended) as e:
            await world.collect(world.generation(slo_ttft_ms=1))
        assert e.value.retry_after_ms > 0 and e.value.field == "ttft"
        await asyncio.gather(*busy)
        assert world.dispatcher.cluster()["requests"]["rejected"] == 1

    play(scenario)


def test_lists_are_numbered_and_name_the_attempts_from_when_they_are_sent(play: Play) -> None:
    async def scenario(world: Any) -> None:
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


def test_messages_for_another_incarnation_are_refused(play: Play, draws: Draws) -> None:
    async def scenario(world: Any) -> None:
        g = world.generation()
        stream = world.dispatcher.generate(g)
        await anext(stream)
        fake = world.fakes["p0"]
        old = world.me.__class__(world.me.id, 1)
        error = Draining("not for you").to_wire()
        gone = Gone(sender=fake.ref, target=old, request=g.id, attempt=1, error=error)
        await fake.bus.request("conductor", gone, 1.0)
        rest = [t async for t in stream]
        assert len(rest) == len(draws(g)) - 1
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)
