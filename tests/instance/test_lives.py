"""Whole lives of attempts: short ones, migrated ones, failed ones, shared ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from shared.errors import AgentGone, Draining
from shared.instance.attempts import Phase
from shared.messages import LiveList, Ref, Sampling, Since, SinceReply, Source


@pytest.mark.parametrize("length", [1, 16, 40])
def test_one_token(kit: Any, length: int) -> None:
    async def main() -> None:
        async with kit.mesh() as mesh:
            answer = await mesh.gateway.run(kit.tokens(length), kit.greedy(1))
            assert answer.tokens == mesh.expect(kit.tokens(length), kit.greedy(1))
            assert (answer.finish, answer.attempts) == ("length", 1)
            await mesh.quiet(0.2)

    kit.run(main())


def test_first_token_stops(kit: Any) -> None:
    """It answers at once, decode lets go at once, and the output can still be asked for at both."""

    async def main() -> None:
        async with kit.mesh(step_s=0.01) as mesh:
            first = mesh.expect(kit.tokens(40), kit.greedy(1))[0]
            sampling = kit.greedy(20, stop_ids=[first])
            began = asyncio.get_running_loop().time()
            answer = await mesh.gateway.run(kit.tokens(40), sampling, name="r")
            assert asyncio.get_running_loop().time() - began < 0.2
            assert (answer.tokens, answer.finish) == ([first], "stop")
            await mesh.quiet(0.2)
            for service in (mesh.prefills[0], mesh.decodes[0]):
                assert service.table.phase(("r", 1)) is Phase.DONE
                since = Since(sender=mesh.gateway.ref, target=service.ref, request="r", attempt=1, index=0)
                reply = await mesh.gateway.bus.request(service.ref.id, since, 1.0)
                assert isinstance(reply, SinceReply) and reply.outputs[0].finish == "stop"

    kit.run(main())


@pytest.mark.parametrize("moment", [0.05, 0.15, 0.5, 1.0])
def test_decode_dies_and_the_stream_goes_on(kit: Any, moment: float) -> None:
    async def main() -> None:
        async with kit.mesh(decodes=2, step_s=0.05) as mesh:
            tokens = kit.tokens(40)
            sampling = Sampling(max_tokens=40, seed=3, temperature=0.8)
            ask = asyncio.ensure_future(mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (0, 1)]))
            await asyncio.sleep(moment)
            dead = mesh.decodes.pop(0)
            dead.bus.abort()
            for job in list(dead.jobs.values()):
                job.cancel()
            mesh.decodes.insert(0, mesh.decodes[0])
            answer = await ask
            assert answer.tokens == mesh.expect(tokens, sampling)
            assert answer.attempts > 1
            await mesh.quiet(6.0)

    kit.run(main())


def test_agent_dies_under_prefill_and_decode(kit: Any) -> None:
    """Everything is given up and told; new work is refused until the instance has a store again."""

    async def main() -> None:
        async with kit.mesh(prefills=2, decodes=2, step_s=0.05) as mesh:
            tokens, sampling = kit.tokens(60), kit.greedy(30)
            ask = asyncio.ensure_future(mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (1, 1)]))
            await asyncio.sleep(0.5)
            mesh.nodes[2].kill()
            answer = await ask
            assert answer.tokens == mesh.expect(tokens, sampling)
            assert answer.errors == ["agent_gone"]
            mesh.nodes.pop(2)
            await mesh.quiet(6.0)

    kit.run(main())


@pytest.mark.parametrize("count", [3, 4])
def test_agent_dies_when_the_last_token_is_drawn_but_held_back(kit: Any, count: int) -> None:
    """The answer is complete: nothing is computed again for blocks that can no longer be committed."""

    async def main() -> None:
        async with kit.mesh(prefills=2, decodes=2, step_s=0.05) as mesh:
            decode, ended = mesh.decodes[0], asyncio.Event()
            commit = decode.store.commit

            async def until_the_end(*args: Any, **options: Any) -> Any:
                """What is committed once the last token is drawn finds the agent dead."""
                while not any(one.last for one in decode.decoder._by_key.values()) and not ended.is_set():
                    await asyncio.sleep(0.01)
                mesh.nodes[2].kill()
                return await commit(*args, **options)

            decode.store.commit = until_the_end
            tokens, sampling = kit.tokens(60), kit.greedy(count)
            answer = await mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (1, 1)])
            ended.set()
            assert (answer.tokens, answer.attempts) == (mesh.expect(tokens, sampling), 1)
            mesh.nodes.pop(2)
            await mesh.quiet(6.0)

    kit.run(main())


def test_an_agent_that_dies_as_a_sequence_grows_is_named(kit: Any) -> None:
    """The gateway hears why, and no bug of ours is logged."""

    async def main() -> None:
        async with kit.mesh(prefills=2, decodes=2, step_s=0.05) as mesh:

            async def gone(*_: object) -> None:
                raise AgentGone("the agent is gone")

            mesh.decodes[0].store.allocate = gone
            tokens, sampling = kit.tokens(60), kit.greedy(30)
            answer = await mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (1, 1)])
            assert answer.tokens == mesh.expect(tokens, sampling)
            assert answer.errors == ["agent_gone"]
            await mesh.quiet(6.0)

    kit.run(main())


def test_engine_failure_ends_the_culprit_only(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(decodes=2, step_s=0.01) as mesh:
            good, bad = kit.tokens(20, seed=1), kit.tokens(20, seed=2)
            expected = mesh.expect(bad, kit.greedy(20))
            mesh.engines[1].fail_on = expected[8]
            answers = await asyncio.gather(
                mesh.gateway.run(good, kit.greedy(4)),
                mesh.gateway.run(bad, kit.greedy(20), pairs=[(0, 0), (0, 1)]),
            )
            assert answers[0].attempts == 1 or expected[8] in answers[0].tokens
            assert answers[1].tokens == expected and "internal" in answers[1].errors
            await mesh.quiet(6.0)

    kit.run(main())


def test_prefill_engine_failure_is_told(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(prefills=2) as mesh:
            mesh.engines[0].fail_on = kit.tokens(40)[20]
            answer = await mesh.gateway.run(kit.tokens(40), kit.greedy(4), pairs=[(0, 0), (1, 0)])
            assert answer.errors == ["internal"]
            assert answer.tokens == mesh.expect(kit.tokens(40), kit.greedy(4))
            await mesh.quiet(6.0)

    kit.run(main())


def test_youngest_gives_way_when_there_is_no_room_to_grow(kit: Any) -> None:
    async def main() -> None:
        decode = DecodeSettings(headroom=0.0, expected_output=1, growth_timeout_s=0.01, pool_timeout_s=0.5)
        async with kit.mesh(slots=12, decode=decode, step_s=0.01) as mesh:
            asks = []
            for i in range(4):
                asks.append(asyncio.ensure_future(mesh.gateway.run(kit.tokens(30, seed=i), kit.greedy(60))))
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*asks)
            for i, answer in enumerate(answers):
                assert answer.tokens == mesh.expect(kit.tokens(30, seed=i), kit.greedy(60))
            assert answers[0].attempts == 1
            assert any("no_room" in answer.errors for answer in answers)
            await mesh.quiet(6.0)

    kit.run(main())


def test_what_never_fits_is_refused_at_once(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(slots=4) as mesh:
            with pytest.raises(AssertionError, match="does_not_fit"):
                await mesh.gateway.run(kit.tokens(100), kit.greedy(4), attempts=1)
            await mesh.quiet()

    kit.run(main())


def test_two_prefills_of_one_node_share_what_one_computes(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(step_s=0.05) as mesh:
            mesh.prefills.append(await mesh.prefill("p1", mesh.prefills[0].store))
            tokens, sampling = kit.tokens(100), kit.greedy(4)
            answers = await asyncio.gather(
                mesh.gateway.run(tokens, sampling, pairs=[(0, 0)]), mesh.gateway.run(tokens, sampling, pairs=[(1, 0)])
            )
            assert [a.tokens for a in answers] == [mesh.expect(tokens, sampling)] * 2
            assert mesh.engines[0].computed + mesh.engines[2].computed == 100 + 4
            await mesh.quiet()

    kit.run(main())


def test_writer_of_a_shared_prefix_is_cancelled(kit: Any) -> None:
    """Who waited for its blocks computes them."""

    async def main() -> None:
        async with kit.mesh(step_s=0.05) as mesh:
            mesh.prefills.append(await mesh.prefill("p1", mesh.prefills[0].store))
            tokens, sampling = kit.tokens(100), kit.greedy(4)
            first = asyncio.ensure_future(mesh.gateway.run(tokens, sampling, pairs=[(0, 0)], name="a"))
            await asyncio.sleep(0.02)
            second = asyncio.ensure_future(mesh.gateway.run(tokens, sampling, pairs=[(1, 0)], name="b"))
            await asyncio.sleep(0.08)
            stream = mesh.gateway.streams["a", 1]
            first.cancel()
            await mesh.gateway.cancel(stream)
            answer = await second
            assert (answer.tokens, answer.attempts) == (mesh.expect(tokens, sampling), 1)
            await mesh.quiet()

    kit.run(main())


def test_decode_fetches_what_a_third_node_has(kit: Any) -> None:
    """Prefill streams only the rest; when the fetch fails it is asked for those blocks too."""

    async def main(broken: bool) -> int:
        async with kit.mesh(prefills=2, decodes=2, step_s=0.01) as mesh:
            tokens, sampling = kit.tokens(100), kit.greedy(4)
            await mesh.gateway.run(tokens, sampling, pairs=[(0, 0)])
            if broken:
                mesh.network.broken.add("node-p0")
            before = mesh.network.moved
            sources = [Source("node-p0", 6)]
            answer = await mesh.gateway.run(tokens, sampling, pairs=[(1, 1)], sources=sources)
            assert (answer.tokens, answer.attempts) == (mesh.expect(tokens, sampling), 1)
            await mesh.quiet()
            return int(mesh.network.moved - before)

    whole = kit.run(main(False))
    assert kit.run(main(True)) == whole  # the same bytes, from one place or the other


def test_next_turn_finds_prompt_and_answer(kit: Any) -> None:
    """Every full block of prompt and answer is committed at decode, the one that the last token fills included."""

    async def main() -> None:
        async with kit.mesh(step_s=0.01) as mesh:
            for count in (1, 12, 13, 28, 44):
                tokens = kit.tokens(20, seed=count)
                answer = await mesh.gateway.run(tokens, kit.greedy(count))
                await mesh.quiet()
                longer = [*tokens, *answer.tokens, 1]
                again = await mesh.gateway.run(
                    longer, kit.greedy(2), fetch=len(longer) // kit.block, sources=[Source("node-d0", 9)]
                )
                assert again.usage.cached_tokens >= (20 + count) // kit.block * kit.block or count == 1
                assert again.tokens == mesh.expect(longer, kit.greedy(2))

    kit.run(main())


def test_draining_hands_over_at_once(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(prefills=2, decodes=2, step_s=0.05) as mesh:
            tokens, sampling = kit.tokens(40), kit.greedy(40)
            ask = asyncio.ensure_future(mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (1, 1)]))
            await asyncio.sleep(0.7)
            began = asyncio.get_running_loop().time()
            await mesh.decodes[0].drain()
            assert asyncio.get_running_loop().time() - began < 1.0
            answer = await ask
            assert (answer.tokens, answer.errors) == (mesh.expect(tokens, sampling), ["draining"])
            with pytest.raises(Draining):
                mesh.decodes[0].check_open()
            await mesh.quiet()

    kit.run(main())


def test_another_incarnation_refuses_and_knows_nothing(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh() as mesh:
            service = mesh.decodes[0]
            stale = Ref(service.ref.id, service.ref.incarnation + 1)
            lists = LiveList(
                sender=mesh.gateway.ref, target=stale, number=5, attempts=[("a", 1, True), ("b", 1, False)]
            )
            reply = await mesh.gateway.bus.request(stale.id, lists, 1.0)
            assert reply.unknown == [("a", 1)] and reply.sender == service.ref
            since = Since(sender=mesh.gateway.ref, target=stale, request="a", attempt=1, index=0)
            assert (await mesh.gateway.bus.request(stale.id, since, 1.0)).error.code == "stale_incarnation"

    kit.run(main())


def test_requests_with_nothing_to_do_are_refused(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(prefill=PrefillSettings(prefill_chunk=32)) as mesh:
            for tokens, sampling in [([], kit.greedy(4)), ([1], kit.greedy(0)), ([1], kit.greedy(4, choices=2))]:
                with pytest.raises(AssertionError, match="invalid_input"):
                    await mesh.gateway.run(tokens, sampling, attempts=1)
            with pytest.raises(AssertionError, match="context_length_exceeded"):
                await mesh.gateway.run(kit.tokens(5000), kit.greedy(4), attempts=1)
            await mesh.quiet()

    kit.run(main())
