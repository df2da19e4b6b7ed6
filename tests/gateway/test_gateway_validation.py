"""ACCEPTANCE A5, A6: what a client may get wrong is told to it, by name, and harms nobody."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conductor.gateway.ask import Ask, ask_chat, ask_completion
from services.conductor.gateway.body import ChatBody, CompletionBody, decode_body
from shared.errors import InvalidInput
from tests.examples import examples
from tests.gateway.fakes import CHAT, EOS, MODEL, Api, Script, StartApi, assert_envelope

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "x"},
}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

BAD_COMMON: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"logprobs": "a"}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"326": 1}}, "logit_bias"),
    ({"stop_token_ids": [326]}, "stop_token_ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"nonsense": 1}, "nonsense"),
    ({"user": 5}, "user"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 20, "logprobs": True, "n": 128, "max_tokens": 400}, "max_tokens"),
    ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [2**32]}, "prompt[0]"),
    ({"prompt": [1_000_000]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 33, "n": 4}, "n"),
    ({"echo": 1}, "echo"),
    ({"echo": True, "logprobs": 0}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 6}, "logprobs"),
]


async def refused(api: Api, path: str, body: dict[str, Any], param: str) -> None:
    status, answer, headers = await api.post(path, body)
    assert status == 400, answer
    error = assert_envelope(answer, headers)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert param.split("[")[0] in error["message"]
    assert api.dispatcher.asked == []


@pytest.mark.parametrize(("fields", "param"), BAD_COMMON)
async def test_a_bad_value_is_refused_by_name(api: Api, fields: dict[str, Any], param: str) -> None:
    await refused(api, "/v1/chat/completions", CHAT | fields, param)
    await refused(api, "/v1/completions", {"model": MODEL, "prompt": "x"} | fields, param)


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
async def test_a_bad_chat_is_refused_by_name(api: Api, fields: dict[str, Any], param: str) -> None:
    await refused(api, "/v1/chat/completions", CHAT | fields, param)


@pytest.mark.parametrize(("fields", "param"), BAD_TEXT)
async def test_a_bad_completion_is_refused_by_name(api: Api, fields: dict[str, Any], param: str) -> None:
    await refused(api, "/v1/completions", {"model": MODEL, "prompt": "x"} | fields, param)


async def test_messages_name_field_value_and_limit(api: Api) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"max_tokens": "5"}, ("'max_tokens'", "int", '"5"')),
        ({"temperature": 9.5}, ("'temperature'", "<= 2", "9.5")),
        ({"top_k": -7}, ("'top_k'", ">= 0", "-7")),
        ({"n": 500}, ("'n'", "<= 128", "500")),
        ({"logit_bias": {"7000": 1}}, ("'logit_bias'", "7000", "326 tokens")),
        ({"stop_token_ids": [7000]}, ("'stop_token_ids'", "7000", "326 tokens")),
    ]
    for fields, words in cases:
        _, answer, _ = await api.chat(**fields)
        assert all(word in answer["error"]["message"] for word in words), answer


async def test_a_missing_required_field_is_named(api: Api) -> None:
    await refused(api, "/v1/chat/completions", {"model": MODEL}, "messages")
    await refused(api, "/v1/completions", {"model": MODEL}, "prompt")
    await refused(api, "/v1/completions", {"prompt": "x"}, "model")


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"a":"\\ud800"}', b"[" * 100_000, b'{"model":' * 50_000],
)
async def test_what_is_no_json_object_is_refused(api: Api, path: str, raw: bytes) -> None:
    async with api.http.post(api.server.url + path, data=raw, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert_envelope(await response.json(), response.headers)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_unknown_model_is_404(api: Api, path: str) -> None:
    body = BASES[path] | {"model": "gpt-9"}
    status, answer, headers = await api.post(path, body)
    assert status == 404
    assert assert_envelope(answer, headers)["code"] == "model_not_found"


async def test_neutral_values_of_what_is_not_supported_pass(api: Api) -> None:
    api.says("ok")
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "tools": [{"type": "x"}],
        "tool_choice": "none", "modalities": ["text"], "parallel_tool_calls": True, "user": "u", "store": False,
        "metadata": {"a": "b"}, "service_tier": "auto", "presence_penalty": 0, "logit_bias": {}, "seed": None,
        "stop": None, "stream_options": None, "max_tokens": None,
    }  # fmt: skip
    status, answer, _ = await api.chat(**neutral)
    assert status == 200, answer
    assert (await api.complete(n=1, echo=False, best_of=1, suffix="", logprobs=None))[0] == 200
    assert (await api.chat(tools=[], tool_choice="auto"))[0] == 200


async def test_what_an_assistant_said_may_be_sent_back_as_it_came(api: Api) -> None:
    api.says("ok")
    _, answer, _ = await api.chat()
    said = answer["choices"][0]["message"]
    status, answer, _ = await api.chat(messages=[*CHAT["messages"], said, *CHAT["messages"]])
    assert status == 200, answer


async def test_a_prompt_longer_than_the_context_is_told_so(api: Api) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": [5] * 512},
        {"prompt": [5] * 600},
        {"prompt": [5] * 500, "max_tokens": 13},
        {"max_tokens": 10**9},
    ]
    for body in bodies:
        status, answer, headers = await api.complete(**body)
        assert status == 400
        error = assert_envelope(answer, headers)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "512" in error["message"]
    status, answer, _ = await api.chat(max_completion_tokens=511)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert api.dispatcher.asked == []


async def test_a_prompt_that_just_fits_is_served(api: Api) -> None:
    api.dispatcher.script = Script([EOS], finish="stop")
    assert (await api.complete(prompt=[5] * 511))[0] == 200
    assert (await api.complete(prompt=[5] * 500, max_tokens=12))[0] == 200
    assert [g.sampling.max_tokens for g in api.dispatcher.asked] == [1, 12]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__))


@settings(max_examples=examples(60))
@given(st.sampled_from(ENDPOINTS), st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), JSON, max_size=4))
def test_no_json_object_is_worse_than_a_400(path: str, fields: dict[str, Any]) -> None:
    kind: Any = ChatBody if "chat" in path else CompletionBody
    base = BASES[path]
    try:
        body = decode_body(msgspec.json.encode(base | fields), kind)
        ask = ask_chat(body) if isinstance(body, ChatBody) else ask_completion(body)
    except InvalidInput as error:
        assert error.message
    else:
        assert isinstance(ask, Ask)


async def test_random_json_over_the_wire_never_gives_a_5xx(start: StartApi) -> None:
    """The same over HTTP, with what a fixed seed draws: bodies that pass validation are answered."""
    api = await start()
    api.says("ok")
    dice = random.Random(7)
    values: list[Any] = [
        None,
        True,
        0,
        1,
        -1,
        1e30,
        "",
        "x",
        [],
        {},
        [1],
        [[]],
        {"type": "text"},
        [{"role": "user"}],
        "\0",
    ]
    for _ in range(150):
        fields = {dice.choice(FIELDS): dice.choice(values) for _ in range(dice.randrange(1, 4))}
        path = dice.choice(ENDPOINTS)
        base = BASES[path]
        async with api.http.post(api.server.url + path, json=base | fields) as response:
            assert response.status < 500, (fields, await response.text())
            await response.read()


@pytest.mark.parametrize(("role", "supported"), [("user", "text"), ("assistant", "text, refusal")])
def test_a_part_that_is_not_taken_is_told_what_is(role: str, supported: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    body = CHAT | {"messages": [{"role": role, "content": [part]}]}
    with pytest.raises(InvalidInput, match=rf'\(supported are {supported}\); the request has "image_url"') as refused:
        decode_body(msgspec.json.encode(body), ChatBody)
    assert refused.value.field.startswith("messages[0].content[0]")
