"""ACCEPTANCE A3, A4, A8, A9, A10: the shapes of answers, streamed and whole, and that both say the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.conductor.gateway.options import GatewayOptions
from shared.blocks import chain_keys
from tests.gateway.fakes import CHAT, EOS, MODEL, NAMESPACE, Api, Script, StartApi

TEXTS = ["Paris.", "", "a 🗼 tower", "日本語のテキスト", "e\u0301 a\u0308 👩‍👩‍👧", 'line\nbreak\t"quoted" \\ </s>']


def joined(events: list[str]) -> str:
    """The text of all deltas of choice 0."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)


def finish(events: list[str]) -> str:
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events if event != "[DONE]"]
    assert [reason for reason in reasons if reason] == reasons[-1:]
    return str(reasons[-1])


async def test_a_whole_chat_has_every_field(api: Api) -> None:
    api.says("Paris.", cached=7)
    status, answer, headers = await api.chat()
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert isinstance(answer["created"], int)
    assert answer["system_fingerprint"].startswith("fp_")
    message = {"role": "assistant", "content": "Paris.", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    prompt, out = len(api.dispatcher.asked[0].tokens), len(api.ids("Paris.")) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": out,
        "total_tokens": prompt + out,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


async def test_a_streamed_chat_has_role_deltas_finish_and_done(api: Api) -> None:
    api.says("Paris is nice")
    events = await api.chat_events()
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert all(set(choice["delta"]) == {"content"} for choice in middle)
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert joined(events) == "Paris is nice"


async def test_usage_comes_in_one_last_chunk_without_choices(api: Api) -> None:
    api.says("Paris.", cached=3)
    for events in (
        await api.chat_events(stream_options={"include_usage": True}),
        await api.events("/v1/completions", {"model": MODEL, "prompt": "x", "stream_options": {"include_usage": True}}),
    ):
        *chunks, usage = [json.loads(event) for event in events[:-1]]
        assert events[-1] == "[DONE]"
        assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert usage["usage"]["completion_tokens"] == len(api.ids("Paris.")) + 1


@pytest.mark.parametrize("text", TEXTS)
async def test_streamed_text_equals_whole_text(api: Api, text: str) -> None:
    api.says(text)
    _, answer, _ = await api.chat()
    events = await api.chat_events()
    assert answer["choices"][0]["message"]["content"] == text == joined(events)
    assert "\ufffd" not in "".join(events)
    _, answer, _ = await api.complete()
    assert answer["choices"][0]["text"] == text
    assert joined(await api.events("/v1/completions", {"model": MODEL, "prompt": "x"})) == text


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        ("word", "stop word STOP", "stop "),
        (["STOP", "word"], "stop word STOP", "stop "),
        (["日本語"], "xx日本語yy", "xx"),
        ("aabaaa", "aabaabaaac", "aab"),
        ("nowhere", "the text", "the text"),
        (" text", "the text", "the"),
        ("the", "the text", ""),
    ],
)
async def test_stop_strings_end_the_text_and_never_leak(api: Api, stop: Any, text: str, expected: str) -> None:
    api.says(text)
    _, answer, _ = await api.chat(stop=stop)
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = await api.chat_events(stop=stop)
    assert joined(events) == expected
    assert finish(events) == "stop"
    assert api.dispatcher.open == 0


async def test_a_stop_string_ends_an_endless_generation(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("more and more STOP"), endless=True)
    status, answer, _ = await api.chat(stop="STOP", max_tokens=400)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert answer["usage"]["completion_tokens"] < 40
    await asyncio.sleep(0)
    assert api.dispatcher.open == 0
    assert api.dispatcher.produced < 400


async def test_an_answer_that_ends_by_itself_is_not_cancelled(api: Api) -> None:
    api.says("Paris is nice")
    await api.chat()
    await api.chat_events()
    await api.complete(prompt=["a", "b"])
    assert (api.dispatcher.completed, api.dispatcher.closed) == (4, 4)


async def test_stop_strings_wait_for_min_tokens(api: Api) -> None:
    api.says("a a a a a a")
    _, answer, _ = await api.complete(stop="a", min_tokens=4, max_tokens=50)
    assert answer["usage"]["completion_tokens"] >= 4


async def test_one_token_has_the_right_finish_reason(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("abc"), endless=True)
    _, answer, _ = await api.chat(max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    events = await api.chat_events(max_tokens=1)
    assert finish(events) == "length"
    assert api.dispatcher.open == 0


async def test_a_first_token_that_ends_the_answer_gives_an_empty_one(api: Api) -> None:
    api.dispatcher.script = Script([EOS], endless=True)
    _, answer, _ = await api.chat()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = await api.chat_events()
    assert (joined(events), finish(events), len(events)) == ("", "stop", 3)


async def test_a_stop_token_has_no_text(api: Api) -> None:
    ids = api.ids("abcd")
    api.dispatcher.script = Script(ids, finish="length")
    _, answer, _ = await api.chat(stop_token_ids=[ids[-1]])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "abcd".startswith(answer["choices"][0]["message"]["content"])
    assert answer["choices"][0]["message"]["content"] != "abcd"


async def test_ignore_eos_goes_on_behind_it(api: Api) -> None:
    api.dispatcher.script = Script([EOS, *api.ids("on")], endless=True)
    _, answer, _ = await api.chat(ignore_eos=True, max_tokens=6)
    assert answer["usage"]["completion_tokens"] == 6
    assert api.dispatcher.asked[0].sampling.stop_ids == []


async def test_sampling_reaches_the_dispatcher_as_asked(api: Api) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": -3, "max_tokens": 9, "min_tokens": 2, "min_p": 0.1,
        "stop_token_ids": [7], "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"5": -100},
    }  # fmt: skip
    await api.chat(**options)
    sampling = api.dispatcher.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, -3)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_ids) == (9, 2, [EOS, 7])
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {5: -100.0})


async def test_requests_without_a_seed_get_different_ones(api: Api) -> None:
    await api.chat()
    await api.chat()
    first, second = api.dispatcher.asked
    assert first.sampling.seed != second.sampling.seed
    assert first.id != second.id


async def test_the_default_limit_is_the_rest_of_the_context_up_to_a_setting(start: StartApi) -> None:
    api = await start(options=GatewayOptions(model=MODEL, default_max_tokens=50))
    await api.complete(prompt=[5] * 400)
    await api.complete(prompt=[5] * 500)
    assert [g.sampling.max_tokens for g in api.dispatcher.asked] == [50, 12]


async def test_the_prompt_is_what_the_template_makes_of_the_messages(api: Api) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A fox.", "refusal": None},
        {"role": "user", "content": "ünï日本"},
    ]
    await api.chat(messages=messages)
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is this?<|im_end|>\n"
        "<|im_start|>assistant\nA fox.<|im_end|>\n<|im_start|>user\nünï日本<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = api.dispatcher.asked[0].tokens
    assert list(tokens) == api.ids(text)
    assert list(tokens).count(1) == 5  # <|im_start|> as one token each


async def test_keys_are_those_of_the_namespace(api: Api) -> None:
    await api.complete(prompt=list(range(3, 3 + 40)))
    generation = api.dispatcher.asked[0]
    assert generation.root == NAMESPACE.root()
    assert generation.keys == chain_keys(NAMESPACE.root(), generation.tokens, NAMESPACE.block_size)
    assert len(generation.keys) == 2 * 16


async def test_completions_take_text_ids_and_lists_of_either(api: Api) -> None:
    api.says("ok")
    ids = api.ids("hello")
    for prompt, count in (("hello", 1), (ids, 1), (["hello", "hello"], 2), ([ids, ids, ids], 3)):
        api.dispatcher.asked.clear()
        status, answer, _ = await api.complete(prompt=prompt)
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert [list(g.tokens) for g in api.dispatcher.asked] == [ids] * count
        assert answer["usage"]["prompt_tokens"] == count * len(ids)
        assert answer["object"] == "text_completion"
        assert answer["choices"][0] == {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}


async def test_several_prompts_stream_side_by_side(api: Api) -> None:
    scripts = {4: Script(api.ids("one ") * 3, delay=0.001), 5: Script(api.ids("two"), delay=0.002)}
    api.dispatcher.scripts = lambda generation: scripts[int(generation.tokens[0])]
    events = await api.events("/v1/completions", {"model": MODEL, "prompt": [[4], [5]]})
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    texts = {i: "".join(c["text"] for c in choices if c["index"] == i) for i in (0, 1)}
    assert texts == {0: "one one one ", 1: "two"}
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1]


async def test_models_are_listed_and_shown(api: Api) -> None:
    async with api.http.get(api.server.url + "/v1/models") as response:
        listed = await response.json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "mooncake")
    async with api.http.get(api.server.url + f"/v1/models/{MODEL}") as response:
        assert await response.json() == model
    async with api.http.get(api.server.url + "/v1/models/other/name") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_tokens_that_are_there_together_leave_in_one_write(api: Api) -> None:
    """A client that reads slowly must not cost a packet for each token."""
    api.dispatcher.script = Script(api.ids("word ") * 60)
    async with api.http.post(api.server.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        chunks = [chunk async for chunk, _ in response.content.iter_chunks()]
    assert b"".join(chunks).count(b"data: ") > 60
