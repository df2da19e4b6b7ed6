"""ACCEPTANCE A11: several choices, log-probabilities, echo: what the dispatcher is asked, and the shape of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from services.conductor.gateway.choices import derived_seed, fan_out, leader, related
from services.conductor.gateway.prompts import Prepared
from services.conductor.generation import Generation
from shared.errors import AttemptFailed, Contended
from shared.messages import Sampling
from tests.gateway.fakes import CHAT, EOS, MODEL, Api, Script, until

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "x"}
LONG = list(range(3, 43))  # token ids with two full blocks


def by_seed(api: Api, seed: int, scripts: list[Script]) -> Callable[[Generation], Script]:
    """Choice ``j`` plays the ``j``-th script."""
    numbers = {derived_seed(seed, j): script for j, script in enumerate(scripts)}
    return lambda generation: numbers[generation.sampling.seed]


def choices_of(events: list[str]) -> list[dict[str, Any]]:
    assert events[-1] == "[DONE]"
    return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


def test_seeds_of_choices_are_fixed_and_their_own() -> None:
    seeds = [derived_seed(seed, j) for seed in (0, 1, -1, 2**63 - 1, -(2**63)) for j in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert [derived_seed(5, j) for j in range(3)] == [5, 6170373840279617265, 4687376709980235163]


def test_choices_follow_each_other_prompt_by_prompt() -> None:
    import numpy as np

    prompts = [Prepared(np.array([i], dtype=np.uint32), b"", b"", Sampling(max_tokens=1, seed=9)) for i in range(2)]
    choices = fan_out(prompts, 3)
    assert [int(choice.tokens[0]) for choice in choices] == [0, 0, 0, 1, 1, 1]
    assert [choice.sampling.seed for choice in choices] == [derived_seed(9, j) for j in range(3)] * 2
    assert [leader(i, 3) for i in range(6)] == [0, 0, 0, 3, 3, 3]
    generations = related([Generation(str(i), c.tokens, b"", b"", c.sampling, 0.0) for i, c in enumerate(choices)], 3)
    siblings = [generation.siblings for generation in generations]
    assert siblings[0] is siblings[1] is siblings[2] is not siblings[3] is siblings[4]
    alone = Generation("x", choices[0].tokens, b"", b"", choices[0].sampling, 0.0)
    assert related([alone], 1) == [alone]


async def test_every_choice_has_its_text_and_reason(api: Api) -> None:
    api.dispatcher.scripts = by_seed(
        api, 4, [Script([*api.ids("one"), EOS], cached=7), Script(api.ids("two")), Script(api.ids("three STOP"))]
    )
    options = {"n": 3, "seed": 4, "stop": " STOP"}
    _, answer, _ = await api.chat(**options)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "two", "three"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "stop"]
    prompt = len(api.dispatcher.asked[0].tokens)
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    drawn = len(api.ids("one")) + 1 + len(api.ids("two")) + len(api.ids("three STOP"))
    assert answer["usage"]["completion_tokens"] == drawn
    events = choices_of(await api.chat_events(**options))
    for index, text in enumerate(("one", "two", "three")):
        own = [choice for choice in events if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [
            ["stop", "length", "stop"][index]
        ]
    await until(lambda: api.dispatcher.open == 0)


async def test_further_choices_wait_for_the_first_token_of_the_first(api: Api) -> None:
    """They find the prompt's blocks in the cache then. A prompt without a full block has none to wait for."""
    api.dispatcher.scripts = by_seed(api, 1, [Script(api.ids("a b c"), delay=0.05), *[Script(api.ids("z"))] * 3])
    task = asyncio.create_task(api.complete(prompt=LONG, n=4, seed=1))
    await until(lambda: bool(api.dispatcher.asked))
    assert len(api.dispatcher.asked) == 1
    await until(lambda: api.dispatcher.produced > 0)
    await until(lambda: len(api.dispatcher.asked) == 4)
    assert (await task)[0] == 200
    api.dispatcher.asked.clear()
    api.dispatcher.scripts = by_seed(api, 1, [Script(api.ids("never"), delay=300)] * 4)
    task = asyncio.create_task(api.complete(prompt=LONG[:5], n=4, seed=1))
    await until(lambda: len(api.dispatcher.asked) == 4)
    task.cancel()
    await until(lambda: api.dispatcher.open == 0)


async def test_a_first_choice_that_ends_at_once_lets_the_others_begin(api: Api) -> None:
    api.dispatcher.scripts = by_seed(api, 1, [Script([EOS], endless=True), Script(api.ids("more"))])
    _, answer, _ = await api.complete(prompt=LONG, n=2, seed=1)
    assert [choice["text"] for choice in answer["choices"]] == ["", "more"]


@pytest.mark.parametrize("failing", [0, 1])
async def test_an_error_of_one_choice_ends_all(api: Api, failing: int) -> None:
    endless = Script(api.ids("on and "), delay=0.001, endless=True)
    broken = Script(api.ids("x"), error=AttemptFailed("lost"))
    scripts = [broken, endless] if failing == 0 else [endless, broken]
    api.dispatcher.scripts = by_seed(api, 1, scripts)
    status, answer, _ = await api.complete(prompt=LONG, n=2, seed=1, max_tokens=400)
    assert (status, answer["error"]["code"]) == (502, "attempt_failed")
    await until(lambda: api.dispatcher.open == 0)
    *_, last = await api.events("/v1/completions", COMPLETION | {"prompt": LONG, "n": 2, "seed": 1, "max_tokens": 400})
    assert json.loads(last)["error"]["code"] == "attempt_failed"
    await until(lambda: api.dispatcher.open == 0)


async def test_a_further_choice_waits_where_the_mesh_is_full(api: Api) -> None:
    """The request was accepted; that one of its choices finds no room is no reason to break the others."""
    refused: list[str] = []

    def scripts(generation: Generation) -> Script:
        if generation.sampling.seed != 1 and len(refused) < 2:
            refused.append(generation.id)
            return Script([], error=Contended("full", retry_after_ms=1))
        return Script(api.ids("ok"))

    api.dispatcher.scripts = scripts
    _, answer, _ = await api.complete(prompt=LONG, n=2, seed=1)
    assert [choice["text"] for choice in answer["choices"]] == ["ok", "ok"]
    assert len(refused) == 2


async def test_a_client_that_leaves_ends_all_choices(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("on and "), delay=0.001, endless=True)
    body = COMPLETION | {"prompt": LONG, "n": 8, "stream": True, "max_tokens": 450}
    async with api.http.post(api.server.url + "/v1/completions", json=body) as response:
        await response.content.readany()
        await until(lambda: api.dispatcher.open == 8)
    await until(lambda: api.dispatcher.open == 0)


async def test_chat_logprobs_whole_and_streamed_are_the_same(api: Api) -> None:
    api.says("a 🗼 tower")
    options = {"logprobs": True, "top_logprobs": 3}
    _, answer, _ = await api.chat(**options)
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a 🗼 tower"
    ids = api.ids("a 🗼 tower")
    assert [entry["logprob"] for entry in content] == [-id / 100 for id in ids], "without the token that ended it"
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * len(ids)
    assert [entry["top_logprobs"][0]["token"] for entry in content] == [entry["token"] for entry in content]
    assert api.dispatcher.asked[0].sampling.logprobs == 3
    events = choices_of(await api.chat_events(**options))
    streamed = [choice["logprobs"]["content"] for choice in events if choice["logprobs"]]
    assert [entry for part in streamed for entry in part] == content
    assert events[-1]["logprobs"] is None
    said = b""
    for event in events:
        said += bytes(b for entry in (event["logprobs"] or {"content": []})["content"] for b in entry["bytes"])
    assert said.decode() == "a 🗼 tower"


async def test_completion_logprobs_have_offsets_and_the_drawn_token(api: Api) -> None:
    api.says("a 🗼 é b")
    _, answer, _ = await api.complete(logprobs=2)
    found = answer["choices"][0]["logprobs"]
    ids = api.ids("a 🗼 é b")
    assert [len(values) for values in found.values()] == [len(ids)] * 4
    assert found["token_logprobs"] == [-id / 100 for id in ids]
    assert all(
        token in top and len(top) == 2 for token, top in zip(found["tokens"], found["top_logprobs"], strict=True)
    )
    assert found["text_offset"] == sorted(found["text_offset"])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or answer["choices"][0]["text"][offset:].startswith(token)
    events = choices_of(await api.events("/v1/completions", COMPLETION | {"logprobs": 2}))
    parts = [choice["logprobs"] for choice in events if choice["logprobs"]]
    assert {name: [value for part in parts for value in part[name]] for name in found} == found


async def test_no_alternatives_are_no_reason_for_no_logprobs(api: Api) -> None:
    api.says("ok")
    _, answer, _ = await api.chat(logprobs=True)
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[]] * len(api.ids("ok"))
    _, answer, _ = await api.complete(logprobs=0)
    assert [list(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"]] == [
        [token] for token in answer["choices"][0]["logprobs"]["tokens"]
    ]
    api.dispatcher.script = Script([EOS], endless=True)
    _, answer, _ = await api.chat(logprobs=True)
    assert answer["choices"][0]["logprobs"] == {"content": [], "refusal": None}


async def test_nothing_of_a_stop_string_is_in_the_logprobs(api: Api) -> None:
    api.says("stop word STOP and more")
    for stop, text in (("word STOP", "stop "), ("op", "st"), ("p w", "sto")):
        _, answer, _ = await api.chat(logprobs=True, stop=stop)
        [choice] = answer["choices"]
        assert choice["message"]["content"] == text
        tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert text.startswith(tokens)
        streamed = choices_of(await api.chat_events(logprobs=True, stop=stop))
        listed = [entry for one in streamed for entry in (one["logprobs"] or {"content": []})["content"]]
        assert listed == choice["logprobs"]["content"]


async def test_echo_begins_with_the_prompt(api: Api) -> None:
    api.says(" end")
    ids = api.ids("🗼 stop")
    for prompt, before in (
        ("hello", ["hello"]),
        (ids, ["🗼 stop"]),
        (["a", "b"], ["a", "b"]),
        ([ids, ids], ["🗼 stop"] * 2),
    ):
        expected = [text + " end" for text in before for _ in range(2)]
        _, answer, _ = await api.complete(prompt=prompt, echo=True, n=2)
        assert [choice["text"] for choice in answer["choices"]] == expected
        events = choices_of(await api.events("/v1/completions", COMPLETION | {"prompt": prompt, "echo": True, "n": 2}))
        texts = ["".join(c["text"] for c in events if c["index"] == i) for i in range(len(expected))]
        assert texts == expected


async def test_echo_of_special_tokens_is_their_name(api: Api) -> None:
    api.says("ok")
    _, answer, _ = await api.complete(prompt=[1, *api.ids("x")], echo=True)
    assert answer["choices"][0]["text"] == "<|im_start|>xok"


async def test_tools_that_must_not_be_called_are_not(api: Api) -> None:
    api.says("ok")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    status, answer, _ = await api.chat(tools=[tool], tool_choice="none")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "ok")
    before = api.dispatcher.asked[-1].tokens.tolist()
    await api.post("/v1/chat/completions", CHAT)
    assert api.dispatcher.asked[-1].tokens.tolist() == before
