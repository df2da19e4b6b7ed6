"""``/openapi.json`` says exactly what the server does: what it takes, what it refuses, what it answers."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.conductor.gateway.ask import ask_chat, ask_completion
from services.conductor.gateway.body import ChatBody, CompletionBody, decode_body
from services.conductor.gateway.openapi import STATUSES, document, operations
from services.conductor.gateway.prompts import Limits, prepare
from services.conductor.gateway.schemas import Served, up_to
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.tokenizing import DetokenizeBody, TokenizeBody, detokenize, tokenize
from shared.errors import InvalidInput
from tests.examples import examples
from tests.gateway.fakes import CHAT, MODEL, NAMESPACE, Api, StartApi

VOCABULARY = 326
DOCUMENT = document(Served(MODEL, VOCABULARY, 10 * 2**20, keys=True))


def validator(name: str, within: dict[str, Any] = DOCUMENT) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": within["components"]}
    return jsonschema.Draft202012Validator(schema)


def test_it_is_openapi() -> None:
    assert DOCUMENT["openapi"].startswith("3.1")
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(DOCUMENT)
    for ref in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        found: Any = DOCUMENT
        for step in ref.split("/"):
            found = found[step]
    ids = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))


def test_every_object_that_is_sent_to_it_or_by_it_is_strict() -> None:
    loose = {"Cluster", "Description", "Trace"}
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert name in loose or schema["additionalProperties"] is False, name


def test_examples_are_valid() -> None:
    for operation in operations(MODEL):
        for example in operation.examples.values():
            validator(operation.body).validate(example)


async def test_it_has_every_route_and_its_statuses(api: Api) -> None:
    described = {path: next(iter(methods)) for path, methods in DOCUMENT["paths"].items()}
    assert described.pop("/v1/models/{model}") == described.pop("/trace/{request}") == "get"
    assert described == {path: method.lower() for path, (_, method, _) in api.gateway.routes.items()}
    for operation in operations(MODEL):
        answers = DOCUMENT["paths"][operation.path][operation.method]["responses"]
        assert set(answers) == {"200", *map(str, operation.errors)}
        assert set(operation.errors) <= set(STATUSES)


async def test_the_server_serves_it(api: Api) -> None:
    async with api.http.get(api.server.url + "/openapi.json") as response:
        served = await response.json()
    assert served == document(Served(MODEL, api.tokenizer.vocabulary, 10 * 2**20, keys=False))
    assert all(not one["security"] for path in served["paths"].values() for one in path.values())


# -- what it answers -------------------------------------------------------------------------------------------


async def test_every_answer_is_as_described(start: StartApi) -> None:
    api = await start()
    api.says("ok and more")
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        ("ChatCompletion", "/v1/chat/completions", CHAT),
        ("ChatCompletion", "/v1/chat/completions", CHAT | {"n": 2, "max_tokens": 2}),
        ("TextCompletion", "/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "echo": True}),
        ("Tokenized", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("Tokenized", "/v1/tokenize", {"messages": CHAT["messages"]}),
        ("Detokenized", "/detokenize", {"tokens": [5, 6]}),
        ("Error", "/v1/completions", {"model": "x", "prompt": ""}),
        ("Error", "/nowhere", {}),
    ]
    for name, path, body in wanted:
        _, answer, _ = await api.post(path, body)
        validator(name).validate(answer)
    for name, path in [
        ("ModelList", "/v1/models"),
        ("Model", f"/v1/models/{MODEL}"),
        ("Version", "/version"),
        ("Health", "/health"),
        ("Ready", "/ready"),
        ("Cluster", "/cluster"),
        ("Description", "/openapi.json"),
        ("Error", "/v1/models/none"),
    ]:
        async with api.http.get(api.server.url + path) as response:
            validator(name).validate(await response.json())


@pytest.mark.parametrize("usage", [True, False])
async def test_every_event_is_as_described(start: StartApi, usage: bool) -> None:
    api = await start()
    api.says("ok")
    more = {"stream_options": {"include_usage": True}} if usage else {}
    for name, path, body in (
        ("ChatChunk", "/v1/chat/completions", CHAT),
        ("TextChunk", "/v1/completions", {"model": MODEL, "prompt": "x", "echo": True}),
    ):
        events = await api.events(path, body | more)
        assert events.pop() == "[DONE]"
        for event in events:
            validator(name).validate(json.loads(event))


async def test_an_unready_server_answers_as_described(start: StartApi) -> None:
    api = await start()
    api.gateway.draining = True
    async with api.http.get(api.server.url + "/ready") as response:
        assert response.status == 503
        validator("Ready").validate(await response.json())


async def test_a_number_without_a_fraction_is_an_integer(api: Api) -> None:
    """As JSON Schema has it."""
    assert (await api.chat(max_tokens=1.0, seed=-3.0, stop_token_ids=[5.0]))[0] == 200
    assert (await api.complete(prompt=[5.0, 6], max_tokens=2e0, temperature=1))[0] == 200
    assert api.dispatcher.asked[0].sampling.max_tokens == 1
    assert api.dispatcher.asked[1].tokens.tolist() == [5, 6]
    for body in ({"max_tokens": 1.5}, {"max_tokens": 1e30}, {"max_tokens": 1.0, "seed": 10**30}, {"n": True}):
        status, answer, _ = await api.chat(**body)
        assert (status, answer["error"]["param"] in body) == (400, True), answer


@given(st.integers(0, 2**33), st.integers(0, 2**33))
def test_the_expression_for_token_ids_is_exact(highest: int, number: int) -> None:
    for one in (number, highest, highest + 1, max(highest - 1, 0)):
        assert bool(re.fullmatch(up_to(highest), str(one))) == (one <= highest)


# -- what it takes ---------------------------------------------------------------------------------------------

LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, 1.0, 5.0, 1.5, -1.5, 2.5])
    | st.sampled_from(["", "x", "none", "auto", "text", "function", MODEL])
)
JSON = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "1"]), inner, max_size=3)
    ),
    max_leaves=6,
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "refusal", "image_url"]), "text": LEAF, "refusal": st.just("r")}
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "developer", "assistant", "tool", "function"]) | LEAF,
        "content": st.just("x") | LEAF | st.lists(PART, max_size=2),
        "name": st.just("n") | LEAF,
        "tool_call_id": st.just("c") | LEAF,
        "tool_calls": st.lists(st.just(CALL) | JSON, max_size=2) | LEAF,
        "refusal": st.just("r") | LEAF,
        "annotations": st.just([]) | JSON,
        "zzz": LEAF,
    },
)
TOKENS = st.integers(-1, VOCABULARY + 1) | st.sampled_from([5, 5.0])
PROMPT = st.just("x") | LEAF | st.lists(st.just("x") | TOKENS | st.lists(TOKENS, max_size=3), max_size=3)
OTHERS = {
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": LEAF, "zzz": LEAF}),
    "stop": st.lists(st.just("s") | LEAF, max_size=17),
    "stop_token_ids": st.lists(TOKENS, max_size=3),
    "logit_bias": st.dictionaries(
        st.sampled_from(["1", "0325", "326", "x", "-1", "", "0" * 11]), st.floats(-101, 101), max_size=2
    ),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "modalities": st.sampled_from([["text"], ["audio"]]),
    "tools": st.sampled_from([[], [{"type": "function"}], {}]),
    "functions": st.sampled_from([[], [{}], 0]),
    "metadata": st.dictionaries(st.just("k"), st.just("v") | LEAF),
    "n": st.integers(0, 129),
    "messages": st.lists(MESSAGE, max_size=3),
    "prompt": PROMPT,
    "tokens": st.lists(TOKENS, max_size=4),
}
# Relations between fields that JSON Schema has no words for: the field that the refusal names.
RELATIONS = {"n", "best_of", "min_tokens", "max_tokens", "prompt"}
SCHEMAS = {kind: validator(kind.__name__) for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)}
LIMITS = Limits(context=2**64, default_max=16)


def valid(kind: type[Any]) -> dict[str, Any]:
    if kind is ChatBody:
        return dict(CHAT)
    if kind is CompletionBody:
        return {"model": MODEL, "prompt": "x"}
    return {"prompt": "x"} if kind is TokenizeBody else {"tokens": [5]}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[type[Any], dict[str, Any]]:
    kind = draw(st.sampled_from([ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]))
    body = valid(kind)
    names = st.sampled_from([*kind.__struct_fields__, "zzz"])
    for name in draw(st.lists(names, max_size=4, unique=True)):
        body[name] = draw(OTHERS[name] | LEAF | JSON if name in OTHERS else LEAF | JSON)
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=1)):
        del body[name]
    return kind, body


def serve(raw: bytes, kind: type[Any], tokenizer: Tokenizer) -> None:
    """All that the server does with a body before it asks the mesh."""
    body = decode_body(raw, kind)
    if getattr(body, "model", None) not in (None, MODEL):
        raise InvalidInput("another model", field="model")
    if isinstance(body, TokenizeBody):
        tokenize(body, tokenizer, None)
    elif isinstance(body, DetokenizeBody):
        detokenize(body, tokenizer)
    else:
        ask = ask_chat(body) if isinstance(body, ChatBody) else ask_completion(body)
        prepare(ask, tokenizer, NAMESPACE, LIMITS)


@settings(max_examples=examples(600), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=bodies())
def test_a_body_is_taken_exactly_if_the_schema_allows_it(tokenizer: Tokenizer, case: tuple[type[Any], Any]) -> None:
    kind, body = case
    allowed = SCHEMAS[kind].is_valid(body)
    try:
        serve(msgspec.json.encode(body), kind, tokenizer)
    except InvalidInput as error:
        related = error.field in RELATIONS and "Invalid value" not in error.message
        assert not allowed or related, (body, error.message)
    else:
        assert allowed, (body, next(SCHEMAS[kind].iter_errors(body)))


def test_the_described_vocabulary_is_the_tokenizer_s(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary == VOCABULARY
