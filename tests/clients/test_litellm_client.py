"""LiteLLM, which many applications stand on, with this server as one more provider of OpenAI's API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.live import KEY
from tests.mesh.mesh import MODEL, Mesh

# What it has to warn of lies in its own code.
pytestmark = [pytest.mark.mesh, pytest.mark.filterwarnings("ignore")]

HISTORY = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And which river is there?"},
]


@pytest.fixture(scope="module")
def litellm() -> Any:
    """Imported by the tests that use it: it takes seconds."""
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


@pytest.fixture
def options(mesh: Mesh) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": mesh.url + "/v1",
        "api_key": KEY,
        "messages": HISTORY,
        "temperature": 0,
        "max_tokens": 10,
        "num_retries": 0,
    }


def test_a_chat_with_history(litellm: Any, options: dict[str, Any]) -> None:
    answer = litellm.completion(**options)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_with_history(litellm: Any, options: dict[str, Any]) -> None:
    whole = litellm.completion(**options)
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    again = litellm.stream_chunk_builder(chunks, messages=HISTORY)
    assert again.choices[0].message.content == text
    assert again.choices[0].finish_reason == whole.choices[0].finish_reason
    assert again.usage.completion_tokens == whole.usage.completion_tokens
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_the_same_without_blocking(litellm: Any, options: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**options)
    stream = await litellm.acompletion(**options, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

    await close_litellm_async_clients()  # it keeps them longer than this loop lives


def test_a_second_turn(litellm: Any, options: dict[str, Any]) -> None:
    first = litellm.completion(**options).choices[0].message
    turns = [*HISTORY, first.model_dump(), {"role": "user", "content": "Go on."}]
    assert litellm.completion(**options | {"messages": turns}).choices[0].message.content


def test_text_completion(litellm: Any, options: dict[str, Any]) -> None:
    del options["messages"]
    options |= {"model": f"text-completion-openai/{MODEL}", "prompt": "Once upon a time"}
    whole = litellm.text_completion(**options)
    text = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**options, stream=True))
    assert text == whole.choices[0].text


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_tokens": 10**6}, "ContextWindowExceededError"),
        ({"temperature": 9}, "BadRequestError"),
        ({"api_key": "sk-another-0123456789"}, "AuthenticationError"),
        ({"model": "openai/another"}, "NotFoundError"),
    ],
)
def test_errors_have_their_classes(litellm: Any, options: dict[str, Any], changes: dict[str, Any], error: str) -> None:
    with pytest.raises(getattr(litellm, error)):
        litellm.completion(**options | changes)
