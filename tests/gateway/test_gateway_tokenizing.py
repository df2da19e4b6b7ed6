"""``/tokenize``, ``/detokenize``, the models by name, the version; and the objectives that headers carry."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from yarl import URL

from services.conductor.gateway.messages import ChatMessage
from services.conductor.gateway.objectives import TBT, TTFT, Allowed, Objectives, Range, objectives
from services.conductor.gateway.offload import Offload
from services.conductor.gateway.options import GatewayOptions
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.tokenizing import DetokenizeBody, TokenizeBody, detokenize, tokenize
from services.conductor.settings import ConductorSettings
from shared.config import load
from shared.errors import ConfigError, InvalidInput, Unavailable
from tests.examples import examples
from tests.gateway.fakes import CHAT, MODEL, SPECIAL, Api, FakeDispatcher, Script, StartApi, assert_envelope

MESSAGES = CHAT["messages"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_prompt_and_back(api: Api, prefix: str) -> None:
    status, answer, _ = await api.post(f"{prefix}/tokenize", {"model": MODEL, "prompt": "hello fox"})
    assert (status, answer["count"], answer["max_model_len"]) == (200, len(answer["tokens"]), 512)
    assert answer["tokens"] == api.ids("hello fox")
    assert answer["token_strs"] is None
    assert (await api.post(f"{prefix}/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": "hello fox"}


async def test_a_conversation_has_the_tokens_that_it_would_be_served_with(api: Api) -> None:
    await api.chat()
    _, answer, _ = await api.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    assert answer["tokens"] == api.dispatcher.asked[0].tokens.tolist()
    assert answer["token_strs"][0] == SPECIAL[1]
    _, bare, _ = await api.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert answer["tokens"][: bare["count"]] == bare["tokens"]
    assert answer["count"] > bare["count"]
    _, text, _ = await api.post("/detokenize", {"tokens": bare["tokens"]})
    assert text["prompt"] == "<|im_start|>user\nhello<|im_end|>\n"


def test_special_tokens_are_added_where_they_are_wanted(tokenizer: Tokenizer) -> None:
    library = tokenizer._library.from_str(tokenizer._library.to_str())
    library.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[1]} $0", special_tokens=[(SPECIAL[1], 1)])
    with_bos = Tokenizer(library, tokenizer._template, tokenizer.eos)

    def first(**fields: Any) -> bool:
        return (
            b'"tokens":[1,1,' in (made := tokenize(TokenizeBody(**fields), with_bos, None)) or b'"tokens":[1]' in made
        )

    assert first(prompt="")
    assert not first(prompt="", add_special_tokens=False)
    chat = {"messages": msgspec.convert(MESSAGES, list[ChatMessage])}
    assert not first(**chat)
    assert first(**chat, add_special_tokens=True)


@settings(max_examples=examples(80))
@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.text(text).tolist()
    made = detokenize(DetokenizeBody(tokens=ids), tokenizer)
    assert msgspec.json.decode(made)["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "zzz": 1}, "zzz"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**32]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
async def test_bad_input_is_refused_by_name(api: Api, path: str, body: dict[str, Any], param: str) -> None:
    status, answer, headers = await api.post(path, body)
    assert (status, assert_envelope(answer, headers)["param"]) == (400, param)


async def test_an_id_beyond_the_vocabulary_is_told_the_limit(api: Api) -> None:
    _, answer, _ = await api.post("/detokenize", {"tokens": [10**6]})
    assert "1000000" in answer["error"]["message"]
    assert str(api.tokenizer.vocabulary) in answer["error"]["message"]


async def test_another_model_is_404(api: Api) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        status, answer, headers = await api.post(path, body | {"model": "gpt-9"})
        assert (status, assert_envelope(answer, headers)["code"]) == (404, "model_not_found")


async def test_limits_hold(start: StartApi) -> None:
    offload = Offload(1, 1, 1024)
    api = await start(options=GatewayOptions(model=MODEL, max_body_bytes=2048), offload=offload)
    assert (await api.post("/tokenize", {"prompt": "a" * 3000}))[0] == 413
    assert (await api.post("/detokenize", {"tokens": [1] * 3000}))[0] == 413
    offload._count(1, 1024)  # somebody else's prompts fill the queue
    status, answer, headers = await api.post("/tokenize", {"prompt": "a"})
    assert (status, assert_envelope(answer, headers)["code"]) == (429, "contended")
    assert headers["Retry-After"]
    offload._count(-1, -1024)


async def test_it_needs_no_instance(start: StartApi) -> None:
    class Lonely(FakeDispatcher):
        @property
        def context_length(self) -> int:
            raise Unavailable("no instance")

    api = await start(dispatcher=Lonely(Script([2])))
    status, answer, _ = await api.post("/tokenize", {"prompt": "a"})
    assert (status, answer["max_model_len"]) == (200, None)


async def test_a_model_may_have_slashes(start: StartApi) -> None:
    name = "org/Model-1.5/é"
    api = await start(options=GatewayOptions(model=name))
    for path in ("org/Model-1.5/%C3%A9", "org%2FModel-1.5%2F%C3%A9"):
        async with api.http.get(URL(f"{api.server.url}/v1/models/{path}", encoded=True)) as response:
            assert (response.status, (await response.json())["id"]) == (200, name)
    for path in ("org", "org/", "org/Model-1.5/é/", "/org/Model-1.5/é"):
        async with api.http.get(f"{api.server.url}/v1/models/{path}") as response:
            assert response.status == 404
            assert_envelope(await response.json(), response.headers)


async def test_the_version_is_the_package_s(api: Api) -> None:
    async with api.http.get(api.server.url + "/version") as response:
        assert await response.json() == {"version": importlib.metadata.version("mooncake-mesh")}


# -- objectives ------------------------------------------------------------------------------------------------


async def test_objectives_reach_the_dispatcher(api: Api) -> None:
    headers = {"x-slo-ttft-ms": "500", "X-SLO-TBT-MS": "20"}
    status, _, _ = await api.post("/v1/chat/completions", CHAT | {"priority": -3}, headers=headers)
    asked = api.dispatcher.asked[0]
    assert (status, asked.slo_ttft_ms, asked.slo_tbt_ms, asked.priority) == (200, 500, 20, 3)  # lower goes earlier
    await api.chat()
    asked = api.dispatcher.asked[1]
    assert (asked.slo_ttft_ms, asked.slo_tbt_ms, asked.priority) == (0, 0, 0)


ALLOWED = Allowed(Range(50, 40_000), Range(5, 9000))


@pytest.mark.parametrize("name", [TTFT, TBT])
@pytest.mark.parametrize("value", ["", "x", "1.5", "1e3", "+1", "٣", "1 2", "99999999999", "1" * 5000, "0x10", "1_0"])
def test_a_bad_objective_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        objectives({name: value}, ALLOWED)
    assert refused.value.field == name.lower()
    assert str(ALLOWED.named()[name].most) in refused.value.message
    assert len(refused.value.message) < 300


async def test_a_bad_objective_is_a_400_before_the_body_is_looked_at(api: Api) -> None:
    status, answer, headers = await api.post("/v1/completions", {}, headers={"x-slo-ttft-ms": "0"})
    assert (status, assert_envelope(answer, headers)["param"]) == (400, "x-slo-ttft-ms")


@given(st.sampled_from([TTFT, TBT]), st.integers(-2000, 50_000))
def test_a_request_may_ask_for_what_the_server_allows_and_for_nothing_else(name: str, value: int) -> None:
    allowed = ALLOWED.named()[name]
    try:
        found = objectives({name: str(value)}, ALLOWED)
        assert found == (Objectives(ttft_ms=value) if name == TTFT else Objectives(tbt_ms=value))
        assert allowed.least <= value <= allowed.most
    except InvalidInput as refused:
        assert not allowed.least <= value <= allowed.most
        words = (name.lower(), f"{value}", f"{allowed.least}", f"{allowed.most}")
        assert all(word in refused.message for word in words)


def test_the_configured_objective_may_always_be_asked_for() -> None:
    settings = ConductorSettings(slo_ttft_ms=10_000_000, slo_tbt_ms=3, slo_tbt_range_ms=(10, 60_000))
    assert settings.allowed() == Allowed(Range(1, 10_000_000), Range(3, 60_000))


@pytest.mark.parametrize("text", ["5", "1,2,3", "0,9", "1,99999999999", "a,b", "9,3"])
def test_a_range_of_objectives_that_is_none_is_refused(text: str) -> None:
    assert load(ConductorSettings, ["--slo-tbt-range-ms", "3,9"], {}).slo_tbt_range_ms == (3, 9)
    with pytest.raises(ConfigError, match=r"int \(>= 1, <= 86400000\)|slo_tbt_range_ms is 9,3"):
        load(ConductorSettings, ["--slo-tbt-range-ms", text], {}, prog="conductor")


@pytest.mark.parametrize("value", [-101, 101, 1.5, "1", True])
async def test_a_priority_out_of_range_is_refused_by_name(api: Api, value: Any) -> None:
    status, answer, headers = await api.post("/v1/chat/completions", CHAT | {"priority": value})
    error = assert_envelope(answer, headers)
    assert (status, error["param"]) == (400, "priority") and str(value).lower() in error["message"].lower()
