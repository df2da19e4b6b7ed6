"""LangChain's OpenAI chat model, with message history, blocking and not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.live import KEY
from tests.mesh.mesh import MODEL, Mesh

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langchain_openai import ChatOpenAI

pytestmark = [pytest.mark.mesh]


@pytest.fixture
def chat(mesh: Mesh) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    options: dict[str, Any] = {"temperature": 0, "max_retries": 0, "timeout": 200, "max_tokens": 10, "seed": 1}
    return ChatOpenAI(model=MODEL, base_url=mesh.url + "/v1", api_key=SecretStr(KEY), **options)


def _history() -> list[BaseMessage]:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    return [
        SystemMessage("Answer briefly."),
        HumanMessage("What is the capital of France?"),
        AIMessage("Paris."),
        HumanMessage([{"type": "text", "text": "And which river is there?"}]),
    ]


def test_a_chat_with_history(chat: ChatOpenAI) -> None:
    answer = chat.invoke(_history())
    assert answer.content
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 10


def test_a_streamed_chat_with_history(chat: ChatOpenAI) -> None:
    whole = chat.invoke(_history())
    first, *rest = chat.stream(_history(), stream_usage=True)
    total = first
    for chunk in rest:
        total += chunk
    assert total.content == whole.content
    assert total.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


async def test_the_same_without_blocking(chat: ChatOpenAI) -> None:
    whole = await chat.ainvoke(_history())
    text = "".join([str(chunk.content) async for chunk in chat.astream(_history())])
    assert text == whole.content


def test_what_it_was_answered_becomes_history(chat: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage

    messages = _history()
    for question in ("Go on.", "And then?"):
        messages += [chat.invoke(messages), HumanMessage(question)]
    assert "".join(str(chunk.content) for chunk in chat.stream(messages))


def test_a_batch(chat: ChatOpenAI) -> None:
    one, other = chat.batch([_history(), _history()[:2]])
    assert one.content == chat.invoke(_history()).content
    assert other.content


def test_errors_pass(chat: ChatOpenAI) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="maximum context length"):
        chat.invoke(_history(), max_tokens=10**6)
