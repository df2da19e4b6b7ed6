"""The dispatcher over the in-memory bus, with scripted instances, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from shared.errors import AgentGone, AttemptFailed, Contended, DoesNotFit, Draining, InvalidInput, Unavailable
from tests.dispatch.fakes import expected
from tests.dispatch.world import World, ids

Play = Callable[..., None]


def test_a_request_runs_through(play: Play) -> None:
    async def scenario(world: World) -> None:
        g = world.generation()
        tokens = await world.collect(g)
        assert ids(tokens) == expected(g)
        assert [t.output.index for t in tokens] == list(range(12))
        assert tokens[-1].output.finish == "length" and tokens[0].usage and tokens[1].usage is None
        counts = world.dispatcher.cluster()["requests"]
        assert counts["retried"] == counts["migrated"] == 0

    play(scenario)


def test_a_request_of_one_token_ends_at_prefill(play: Play) -> None:
    async def scenario(world: World) -> None:
        g = world.generation(max_tokens=1)
        assert ids(await world.collect(g)) == expected(g)
        await asyncio.sleep(0.5)
        assert not any(fake.held for fake in world.fakes.values())  # the cancel is the fast path

    play(scenario)


def test_many_at_once_do_not_cross_talk(play: Play) -> None:
    async def scenario(world: World) -> None:
        requests = [world.generation(length=5 + i % 9, max_tokens=3 + i % 5, first=i) for i in range(40)]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [expected(g) for g in requests]
        for role in ("prefill", "decode"):
            assert world.dispatcher.cluster()["balance"][role]["ratio"] <= 1.5
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)


def test_the_same_id_twice_at_once_is_refused_and_free_again_afterwards(play: Play) -> None:
    async def scenario(world: World) -> None:
        g = world.generation()
        first = asyncio.ensure_future(world.collect(g))
        await asyncio.sleep(0.02)
        with pytest.raises(Exception, match="in use"):
            await world.collect(g)
        assert ids(await first) == expected(g)

    play(scenario)


@pytest.mark.parametrize("id", ["p0", "d0"])
def test_a_refusal_means_choose_again(play: Play, id: str) -> None:
    async def scenario(world: World) -> None:
        world.fakes[id].refuse = 1
        requests = [world.generation(), world.generation()]
        answers = await asyncio.gather(*(world.collect(g) for g in requests))
        assert [ids(a) for a in answers] == [expected(g) for g in requests]
        assert world.dispatcher.cluster()["requests"]["retried"] == 1

    play(scenario)


def test_a_refused_landing_avoids_decode_and_keeps_prefill(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.fakes["d0"].refuse_landing = 1
        g = world.generation()
        assert ids(await world.collect(g)) == expected(g)
        assert world.fakes["d1"].accepted == 1 and world.fakes["p0"].accepted == 2

    play(scenario, prefills=1)


def test_everybody_refuses_is_contended(play: Play) -> None:
    async def scenario(world: World) -> None:
        for id in ("d0", "d1"):
            world.fakes[id].refuse = 100
        with pytest.raises(Contended) as e:
            await world.collect(world.generation())
        assert e.value.retry_after_ms > 0 and e.value.field == "no_room"
        assert 19 < asyncio.get_running_loop().time() < 23  # its patience; capacity may have come back until then

    play(scenario)


def test_room_that_comes_back_in_time_is_used(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.fakes["d0"].refuse = 9  # for five seconds or so
        g = world.generation()
        assert ids(await world.collect(g)) == expected(g)

    play(scenario, decodes=1)


def test_what_an_instance_says_of_the_input_is_final(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.fakes["p0"].refuse = 1
        world.fakes["p0"].refuse_with = InvalidInput("no such thing", field="tokens")
        with pytest.raises(InvalidInput) as e:
            await world.collect(world.generation())
        assert e.value.field == "tokens"
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario, prefills=1)


def test_what_fits_no_pool_is_refused_at_once(play: Play) -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(1.5)  # the first reports
        with pytest.raises(DoesNotFit):
            await world.collect(world.generation(length=9000, max_tokens=4))

    play(scenario)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_the_iterator_cancels_everywhere(play: Play, after: int) -> None:
    async def scenario(world: World) -> None:
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


def test_attempts_are_bounded(play: Play) -> None:
    async def scenario(world: World) -> None:
        for fake in world.fakes.values():
            fake.refuse, fake.refuse_with = 1000, AgentGone("scripted")
        with pytest.raises(AttemptFailed, match="after 5 attempts: scripted"):
            await world.collect(world.generation())
        assert sum(len(fake.dead) for fake in world.fakes.values()) <= 2 * 5

    play(scenario)


def test_close_drains_then_cancels(play: Play) -> None:
    async def scenario(world: World) -> None:
        short, long = world.generation(max_tokens=20), world.generation(max_tokens=100_000)
        ending = asyncio.ensure_future(world.collect(short))
        endless = asyncio.ensure_future(world.collect(long))
        await asyncio.sleep(0.1)
        closing = asyncio.ensure_future(world.dispatcher.close(drain=5.0))
        await asyncio.sleep(0.1)
        with pytest.raises(Unavailable, match="draining"):
            await world.collect(world.generation())
        assert ids(await ending) == expected(short)
        with pytest.raises(Draining):
            await endless
        await closing

    play(scenario)


def test_e3_no_instance_is_unavailable(play: Play) -> None:
    async def scenario(world: World) -> None:
        assert set(world.dispatcher.readiness().reasons) == {"no_prefill", "no_decode"}
        with pytest.raises(Unavailable, match="no prefill instance is there yet"):
            world.dispatcher.consider(10)
        with pytest.raises(Unavailable):
            _ = world.dispatcher.namespace
        with pytest.raises(Unavailable):
            await world.collect(world.generation())

    play(scenario, prefills=0, decodes=0)


def test_hopeless_requests_are_refused_before_tokenizing(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.dispatcher.consider(100)
        with pytest.raises(Contended) as e:
            world.dispatcher.consider(100, slo_ttft_ms=1)
        assert e.value.retry_after_ms >= 0

    play(scenario)


def test_what_decode_has_no_room_for_is_refused_before_tokenizing(play: Play) -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(1.5)  # the first reports
        world.dispatcher.consider(4000, prompt_tokens=500)
        for id in ("d0", "d1"):
            world.fakes[id].room = 50
        await asyncio.sleep(1.5)
        world.dispatcher.consider(4000, prompt_tokens=100)
        world.dispatcher.consider(4000)  # of how many tokens is not known yet
        with pytest.raises(Contended) as e:
            world.dispatcher.consider(4000, ticket=7, prompt_tokens=500)
        assert e.value.field == "no_room" and e.value.retry_after_ms > 0
        assert world.dispatcher.cluster()["requests"]["rejected"] == 1
        world.dispatcher.consider(40_000, prompt_tokens=5000)  # larger than any pool: that is no contention
        for id in ("d0", "d1"):
            world.fakes[id].room = 1000
        await asyncio.sleep(2.5)
        world.dispatcher.consider(4000, ticket=7, prompt_tokens=500)

    play(scenario)


def test_an_objective_that_would_be_missed_is_refused_with_a_time(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.prefill_seconds = 1.0
        busy = [asyncio.ensure_future(world.collect(world.generation(first=i))) for i in range(6)]
        await asyncio.sleep(0.2)
        with pytest.raises(Contended) as e:
            await world.collect(world.generation(slo_ttft_ms=1))
        assert e.value.retry_after_ms > 0 and e.value.field == "ttft"
        await asyncio.gather(*busy)
        assert world.dispatcher.cluster()["requests"]["rejected"] == 1

    play(scenario)


@pytest.mark.parametrize(("overtake", "due_ms"), [(0.0, 600_000), (4.0, 44)])
def test_prefill_hears_when_a_prompt_is_due(play: Play, overtake: float, due_ms: int) -> None:
    """By its objective, or by four times the 11 ms that it computes."""

    async def scenario(world: World) -> None:
        await world.collect(world.generation())
        (held,) = world.fakes["p0"].done.values()
        assert due_ms - 10 <= held.admission.deadline_ms <= due_ms

    play(scenario, prefills=1, queue_overtake=overtake)


def test_the_picture_is_whole_and_json(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.collect(world.generation())
        await asyncio.sleep(1.5)
        picture = json.loads(json.dumps(world.dispatcher.cluster()))
        assert picture["ready"] and picture["policy"] == "global_cache" and picture["index"] == {"synced": False}
        assert picture["requests"]["accepted"] == 1 and picture["requests"]["running"] == 0
        by_role = {role: [i for i in picture["instances"] if i["role"] == role] for role in ("prefill", "decode")}
        assert sum(i["served"] for i in by_role["prefill"]) == sum(i["served"] for i in by_role["decode"]) == 1
        assert {i["state"] for i in picture["instances"]} == {"alive"}
        assert all(i["load"]["room_blocks"] == 1000 and i["load"]["queued"] == 0 for i in by_role["decode"])
        assert all(i["latency"] for i in picture["instances"])
        assert [a["code"] for a in picture["agents"]] and not any(a["held"] for a in picture["agents"])

    play(scenario)
