"""A12: the `openai` client as it is installed, blocking, against every endpoint of a live mesh."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import (
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    DefaultHttpxClient,
    InternalServerError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
    Timeout,
)

from tests.clients.live import KEY, conductor_beside
from tests.mesh.mesh import MODEL, Mesh

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

pytestmark = [pytest.mark.mesh]

PROMPT = "The quick brown fox jumps over"
HISTORY: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": [{"type": "text", "text": "And which river "}, {"type": "text", "text": "is there?"}]},
]


# -- answers ---------------------------------------------------------------------------------------------------


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HISTORY, temperature=0, max_completion_tokens=9)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.choices[0].finish_reason == "length") == (answer.usage.completion_tokens == 9)


def test_a_streamed_chat_is_the_same_in_pieces(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HISTORY, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream_comes_last_and_alone(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HISTORY, "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(**options)
    *others, last = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in others)


def test_the_helper_that_puts_a_stream_together(client: OpenAI) -> None:
    """It raises for an answer that was cut at its length, so this one ends at a stop string."""
    options: Any = {"model": MODEL, "messages": HISTORY, "temperature": 0, "max_tokens": 12}
    content = client.chat.completions.create(**options).choices[0].message.content
    assert content
    options["stop"] = content[5:7]
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == content[: content.index(options["stop"])]
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    del options["stop"]
    with pytest.raises(LengthFinishReasonError), client.chat.completions.stream(**options) as stream:
        stream.get_final_completion()


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], [11, 12, 13], [[11, 12, 13], [14, 15]], [PROMPT, "Another"]])
def test_completions(client: OpenAI, usual: OpenAI, prompt: Any) -> None:
    options: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**options)
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in whole.choices] == list(range(count))
    pieces = [""] * count
    for chunk in usual.completions.create(**options, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in whole.choices]


def test_a_second_turn_finds_the_first_in_the_cache(client: OpenAI) -> None:
    question = "Tell me of prefixes that were computed once and are loaded by every later request. " * 4
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    messages.append(first.choices[0].message.to_dict())  # type: ignore[arg-type]  # a client sends back what it got
    messages.append({"role": "user", "content": "Go on."})
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object) == (MODEL, "model")
    with pytest.raises(NotFoundError) as raised:
        client.models.retrieve("another")
    assert raised.value.code == "model_not_found"


def test_raw_responses_have_the_headers(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HISTORY, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.request_id == "mine-1"
    assert raw.parse().usage is not None
    assert client.models.list()._request_id
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, stream=True
    ) as streaming:
        assert streaming.headers["content-type"].startswith("text/event-stream")
        assert streaming.request_id
        assert list(streaming.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_sampling_options_pass(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HISTORY, "max_tokens": 8, "seed": 7, "temperature": 1.3, "top_p": 0.9}
    options |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"11": -100}, "user": "somebody"}
    options |= {"stop": ["\n\n"], "n": 1, "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}}
    first, second = (client.chat.completions.create(**options).choices[0].message.content for _ in range(2))
    assert first == second


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_input"),
        ({"max_tokens": 0}, "max_tokens", "invalid_input"),
        ({"max_tokens": 10**9}, "messages", "context_length_exceeded"),
        ({"messages": []}, "messages", "invalid_input"),
        ({"stop": ["x"] * 17}, "stop", "invalid_input"),
        ({"extra_body": {"nobody_knows": 1}}, "nobody_knows", "invalid_input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client: OpenAI, options: dict[str, Any], param: str, code: str, stream: bool) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": HISTORY, "stream": stream, **options})
    error = raised.value
    assert (error.status_code, error.param, error.code, error.type) == (400, param, code, "invalid_request_error")
    assert error.request_id == error.response.headers["x-request-id"]
    assert param in error.message


def test_a_wrong_key(mesh: Mesh) -> None:
    with OpenAI(base_url=mesh.url + "/v1", api_key="sk-another-0123456789", max_retries=0) as stranger:
        for ask in (
            lambda: stranger.models.list(),
            lambda: stranger.completions.create(model=MODEL, prompt=PROMPT),
            lambda: stranger.chat.completions.create(model=MODEL, messages=HISTORY, stream=True),
        ):
            with pytest.raises(AuthenticationError) as raised:
                ask()
            assert raised.value.code == "invalid_api_key"
            assert "sk-another" not in raised.value.message


def test_what_is_not_here(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as raised:
        client.chat.completions.create(model="another", messages=HISTORY)
    assert raised.value.code == "model_not_found"
    for ask in (
        lambda: client.embeddings.create(model=MODEL, input="x"),
        lambda: client.responses.create(model=MODEL, input="x"),
        lambda: client.files.list(),
    ):
        with pytest.raises(NotFoundError) as unknown:
            ask()
        assert unknown.value.code == "unknown_url"


def test_nobody_to_serve_it(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("alone")
    with (
        conductor_beside(mesh, folder, wait=False, mesh="empty") as lonely,
        OpenAI(base_url=lonely.url + "/v1", api_key=KEY, max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(InternalServerError) as raised:
            client.completions.create(model=MODEL, prompt=PROMPT)
        assert raised.value.status_code == 503
        assert float(raised.value.response.headers["retry-after-ms"]) > 0


def test_a_stream_that_breaks_off_raises(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        conductor_beside(mesh, tmp_path_factory.mktemp("late"), request_timeout_s=1) as late,
        OpenAI(base_url=late.url + "/v1", api_key=KEY, max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        texts = []
        with pytest.raises(Exception, match="not complete after 1 s") as raised:
            texts += [chunk.choices[0].text for chunk in stream]
        assert raised.type.__name__ == "APIError"
        assert not isinstance(raised.value, APIStatusError)
        assert getattr(raised.value, "code", None) == "deadline_exceeded"


# -- going away ------------------------------------------------------------------------------------------------

LONG: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_time_out_ends_the_work(client: OpenAI, mesh: Mesh) -> None:
    hasty = client.with_options(timeout=Timeout(10, read=0.3))
    with pytest.raises(APITimeoutError):
        hasty.completions.create(**LONG)
    assert asyncio.run(mesh.settled()) == {}


def test_closing_a_stream_ends_the_work(usual: OpenAI, mesh: Mesh) -> None:
    with usual.completions.create(**LONG, stream=True) as stream:
        assert next(iter(stream)).choices
        assert mesh.held()
    assert asyncio.run(mesh.settled()) == {}


def test_a_client_that_goes_away_ends_its_work(mesh: Mesh) -> None:
    http = DefaultHttpxClient()
    stream = OpenAI(base_url=mesh.url + "/v1", api_key=KEY, http_client=http).completions.create(**LONG, stream=True)
    next(iter(stream))
    http.close()
    assert asyncio.run(mesh.settled()) == {}
