"""Prompts and answers in traces: nowhere by default, and bounded on the gateway's span when asked for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.conductor.gateway.content import CUT, PART, VARIABLE, Said, asked, is_wanted
from services.conductor.gateway.options import GatewayOptions
from shared.errors import AttemptFailed
from tests.gateway.fakes import MODEL, Api, Script, StartApi

SECRET = "Rosebud"
CALL = {"id": SECRET, "type": "function", "function": {"name": SECRET, "arguments": json.dumps({"at": SECRET})}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": SECRET},
    {"role": "user", "content": [{"type": "text", "text": SECRET}], "name": SECRET},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": SECRET, "tool_call_id": SECRET},
]


def all_of(span: ReadableSpan) -> str:
    return str(span.to_json())


async def ask_everything(api: Api) -> None:
    """Chats, prompts in text and ids, whole and streamed, refused and broken off."""
    ids = api.ids(SECRET)
    api.says(SECRET)
    chat: dict[str, Any] = {"model": MODEL, "messages": TURNS}
    for body in (chat, chat | {"n": 2}, chat | {"stop": SECRET[3:]}, chat | {"stream": True}, chat | {"max_tokens": 0}):
        async with api.http.post(api.server.url + "/v1/chat/completions", json=body) as response:
            await response.read()
    long = SECRET * 500
    for prompt in (SECRET, ids, [SECRET, SECRET], [ids], long, {"no": SECRET}, [2**40]):
        for more in ({}, {"stream": True}, {"echo": True}, {"user": SECRET}):
            async with api.http.post(
                api.server.url + "/v1/completions", json={"model": MODEL, "prompt": prompt, **more}
            ) as response:
                await response.read()
    api.dispatcher.script = Script(ids, error=AttemptFailed("gone"))
    for stream in (False, True):
        async with api.http.post(api.server.url + "/v1/chat/completions", json=chat | {"stream": stream}) as response:
            await response.read()


async def test_nothing_that_was_said_is_in_a_span_by_default(api: Api, spans: InMemorySpanExporter) -> None:
    await ask_everything(api)
    ids = str(api.ids(SECRET))[1:-1]
    finished = spans.get_finished_spans()
    assert len(finished) > 40
    for span in finished:
        assert SECRET not in all_of(span) and SECRET[3:] not in all_of(span) and ids not in all_of(span)


async def test_asked_for_prompt_and_answer_are_on_the_gateways_span(
    start: StartApi, spans: InMemorySpanExporter
) -> None:
    api = await start(options=GatewayOptions(MODEL, trace_content=True))
    api.says("Kane.")
    for stream in (False, True):
        spans.clear()
        body = {"model": MODEL, "messages": TURNS, "stream": stream}
        async with api.http.post(api.server.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            await response.read()
        by_name = {span.name: span for span in spans.get_finished_spans()}
        assert SECRET not in all_of(by_name["tokenize"])
        attributes = dict(by_name["POST /v1/chat/completions"].attributes or {})
        said, answer = (json.loads(str(attributes[f"gen_ai.{way}.messages"])) for way in ("input", "output"))
        assert [turn["role"] for turn in said] == ["system", "user", "assistant", "tool"]
        assert said[1] == {"role": "user", "parts": [{"type": "text", "content": SECRET}], "name": SECRET}
        call = {
            "type": "tool_call",
            "id": SECRET,
            "name": SECRET,
            "arguments": json.dumps({"at": SECRET}).replace(" ", ""),
        }
        assert said[2]["parts"] == [call]
        assert said[3]["parts"] == [{"type": "tool_call_response", "id": SECRET, "response": SECRET}]
        assert answer == [
            {"role": "assistant", "parts": [{"type": "text", "content": "Kane."}], "finish_reason": "stop"}
        ]


async def test_a_prompt_of_ids_is_told_in_words(start: StartApi, spans: InMemorySpanExporter) -> None:
    api = await start(options=GatewayOptions(MODEL, trace_content=True))
    api.says("Kane.")
    assert (await api.complete(prompt=api.ids(SECRET)))[0] == 200
    (root,) = [span for span in spans.get_finished_spans() if span.name == "POST /v1/completions"]
    said = json.loads(str(dict(root.attributes or {})["gen_ai.input.messages"]))
    assert said == [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}]


@given(st.lists(st.text(max_size=300), min_size=1, max_size=30), st.integers(0, 2000))
def test_what_is_kept_of_prompts_is_bounded_and_the_last_stays(texts: list[str], limit: int) -> None:
    turns = [{"role": "user", "content": text} for text in texts]
    attributes = asked([turns], str, limit)
    kept = json.loads(str(attributes["gen_ai.input.messages"]))
    parts = [turn["parts"][0]["content"] for turn in kept]
    assert sum(len(part.removesuffix(CUT)) for part in parts) <= limit and len(parts) <= limit // PART
    whole = sum(len(text) + PART for text in texts) <= limit
    assert attributes.get("mooncake.input_cut", False) is not whole
    if whole:
        assert parts == texts
    for part, text in zip(reversed(parts), reversed(texts), strict=False):
        assert text.startswith(part.removesuffix(CUT))


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=50)), max_size=60), st.integers(0, 500))
def test_what_is_kept_of_answers_is_bounded(pieces: list[tuple[int, str]], limit: int) -> None:
    said = Said(3, limit)
    for choice, text in pieces:
        said.hear(choice, text)
    attributes = said.attributes(["stop", "", "length"])
    answers = json.loads(str(attributes["gen_ai.output.messages"]))
    texts = [answer["parts"][0]["content"] for answer in answers]
    assert sum(map(len, texts)) <= limit + len(CUT)
    assert [answer["finish_reason"] for answer in answers] == ["stop", "error", "length"]
    whole = ["".join(text for choice, text in pieces if choice == i) for i in range(3)]
    assert all(full.startswith(text.removesuffix(CUT)) for full, text in zip(whole, texts, strict=True))
    assert (texts == whole) is not attributes.get("mooncake.output_cut", False)


def test_long_prompts_of_ids_are_not_all_turned_into_text() -> None:
    attributes = asked([np.arange(10_000, dtype=np.uint32)], lambda ids: str(len(ids)), 200)
    assert json.loads(str(attributes["gen_ai.input.messages"]))[0]["parts"][0]["content"] == "200"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("true", True), ("True", True), ("SPAN_ONLY", True), ("span_and_event", True)]
    + [(value, False) for value in ("", "false", "NO_CONTENT", "event_only", "1", "yes")],
)
def test_the_standard_variable_decides(value: str, wanted: bool) -> None:
    assert is_wanted({VARIABLE: value}) is wanted and not is_wanted({})
