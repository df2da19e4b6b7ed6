"""A12: the asynchronous `openai` client, with many requests at once, and with requests that are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from openai import APITimeoutError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError, Timeout

from tests.clients.live import KEY
from tests.mesh.mesh import MODEL, Mesh

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

pytestmark = [pytest.mark.mesh]

LONG: Any = {"model": MODEL, "prompt": "On and on", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def _question(number: int) -> list[ChatCompletionMessageParam]:
    return [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": f"And number {number}?"},
    ]


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=mesh.url + "/v1", api_key=KEY, max_retries=0, timeout=200, _strict_response_validation=True
    ) as one:
        yield one


@pytest.fixture
async def usual(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    """For streamed completions: their chunks have `finish_reason: null`, as OpenAI's have, and other than the type
    that this client declares."""
    async with AsyncOpenAI(base_url=mesh.url + "/v1", api_key=KEY, max_retries=0, timeout=200) as one:
        yield one


async def _whole(client: AsyncOpenAI, number: int) -> str | None:
    answer = await client.chat.completions.create(model=MODEL, messages=_question(number), temperature=0, max_tokens=10)
    return answer.choices[0].message.content


async def _streamed(client: AsyncOpenAI, number: int) -> str:
    stream = await client.chat.completions.create(
        model=MODEL, messages=_question(number), temperature=0, max_tokens=10, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_many_at_once_do_not_mix(client: AsyncOpenAI) -> None:
    expected = [await _whole(client, number) for number in range(6)]
    assert len(set(expected)) > 1
    streams = [_streamed(client, number) for number in range(6)]
    again = [_whole(client, number) for number in range(6)]
    assert await asyncio.gather(*streams, *again) == expected * 2


async def test_completions(client: AsyncOpenAI, usual: AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": [[11, 12, 13], [14, 15]], "temperature": 0, "max_tokens": 6}
    whole = await client.completions.create(**options)
    pieces = ["", ""]
    usage = None
    async for chunk in await usual.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens == 5


async def test_the_helper_that_puts_a_stream_together(client: AsyncOpenAI) -> None:
    whole = await _whole(client, 1)
    assert whole
    async with client.chat.completions.stream(
        model=MODEL, messages=_question(1), temperature=0, max_tokens=10, stop=whole[5:7]
    ) as stream:
        text = "".join([event.delta async for event in stream if event.type == "content.delta"])
        final = await stream.get_final_completion()
    assert text == final.choices[0].message.content == whole[: whole.index(whole[5:7])]


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_have_their_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="top_p"):
        await client.chat.completions.create(model=MODEL, messages=_question(1), top_p=2, stream=True)
    with pytest.raises(NotFoundError, match="another"):
        await client.completions.create(model="another", prompt="x")
    with pytest.raises(AuthenticationError):
        await client.with_options(api_key="sk-another-0123456789").models.retrieve(MODEL)


async def test_a_cancelled_task_leaves_nothing(usual: AsyncOpenAI, mesh: Mesh) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in await usual.completions.create(**LONG, stream=True):
            begun.set()

    reading = [asyncio.create_task(read()) for _ in range(4)]
    waiting = [asyncio.create_task(usual.completions.create(**LONG)) for _ in range(2)]
    await asyncio.wait_for(begun.wait(), 100)
    for task in (*reading, *waiting):
        task.cancel()
    outcomes = await asyncio.gather(*reading, *waiting, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in outcomes)
    assert await mesh.settled() == {}


async def test_a_closed_stream_leaves_nothing(usual: AsyncOpenAI, mesh: Mesh) -> None:
    stream = await usual.completions.create(**LONG, stream=True)
    await anext(aiter(stream))
    await stream.close()
    assert await mesh.settled() == {}


async def test_a_time_out_leaves_nothing(client: AsyncOpenAI, mesh: Mesh) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=Timeout(10, read=0.3)).completions.create(**LONG)
    assert await mesh.settled() == {}
    assert await _whole(client, 3)
