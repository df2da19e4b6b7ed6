"""Chat templates: the same text as the usual library makes, tool messages, and bounds that hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conductor.gateway.chat_template import ChatTemplate
from services.conductor.gateway.messages import ChatMessage, conversation
from shared.errors import InvalidInput
from tests.examples import examples
from tests.gateway.fakes import MODEL, SPECIAL, TEMPLATE, Api, StartApi, assert_envelope, running, write_tokenizer

# In the manner of templates that are in use: what they test, index, strip, count and print as JSON.
TOOLS = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(calls=0) %}
{%- for message in rest %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- '\\n<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>' + message.content | trim + message.tool_call_id }}
        {%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
ALTERNATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['content'] is none %}{{ '<call>' }}{% break %}{% endif %}
    {{- '[' ~ message['role'] | upper ~ ']' ~ message['content'].strip() ~ eos_token }}
{%- endfor %}"""
MACRO = """{%- macro show(m, depth=1) %}{{ '#' * depth }} {{ m.role }}: {{ m.content }}
{% endmacro %}
{%- for m in messages if m.role != 'system' %}
{{ show(m, loop.index) }}{% generation %}{{ {'n': loop.index} | tojson(indent=1) }}{% endgeneration %}
{%- else %}nobody{% endfor %}{{ missing_token }}{{ strftime_now('%Y') | length }}"""

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"ü": [1, "<a>"], "b": {}}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hi \n"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ü<&>"}],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain ", "tool_call_id": "c1"},
        {"role": "tool", "content": "sun", "tool_call_id": "c2"},
    ],
    [{"role": "user", "content": "x", "name": "eve"}, {"role": "assistant", "content": "y"}],
]


def typed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The way a request's messages take to the template."""
    return conversation(msgspec.json.decode(msgspec.json.encode(messages), type=list[ChatMessage]))


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As users of the library write them: a call's arguments are an object."""
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for call in [call for message in copied for call in message.get("tool_calls", ())]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copied


@pytest.fixture(scope="module")
def library(model_folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [TEMPLATE, TOOLS, MACRO, ALTERNATE])
def test_the_text_is_that_of_transformers(library: Any, source: str, messages: list[dict[str, Any]]) -> None:
    ours = ChatTemplate(source, {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]})
    for prompt in (True, False):
        try:
            theirs = library.apply_chat_template(
                with_objects(messages), chat_template=source, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            with pytest.raises(InvalidInput, match="alternate") as refused:
                ours.render(typed(messages), generation_prompt=prompt)
            assert str(error) in refused.value.message
        else:
            assert ours.render(typed(messages), generation_prompt=prompt) == theirs


def test_the_default_model_has_the_prompt_that_transformers_makes() -> None:
    from transformers import PreTrainedTokenizerFast

    from services.conductor.gateway.tokenizer import Tokenizer
    from shared.model import resolve_model

    folder = resolve_model("")
    library, ours = PreTrainedTokenizerFast.from_pretrained(str(folder)), Tokenizer.load(folder)
    for messages in CONVERSATIONS[:3]:
        theirs = library.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.chat(typed(messages)).tolist() == theirs


TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=12)}
)


@settings(max_examples=examples(40))
@given(st.lists(TURN, min_size=1, max_size=5), st.sampled_from([TEMPLATE, TOOLS, MACRO]))
def test_random_conversations_render_as_plain_jinja_does(messages: list[dict[str, Any]], source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(typed(messages)) == theirs[0]


# -- what the messages become ----------------------------------------------------------------------------------


def test_parts_follow_each_other_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert typed([{"role": "developer", "content": parts}]) == [{"role": "system", "content": "ab"}]
    said = [{"type": "refusal", "refusal": "no"}]
    assert typed([{"role": "assistant", "content": said}]) == [{"role": "assistant", "content": "no"}]
    assert typed([{"role": "assistant", "refusal": "no"}]) == [{"role": "assistant", "content": "no"}]


def test_arguments_are_objects_where_they_are_json() -> None:
    def arguments(text: str) -> Any:
        call = {"id": "c", "function": {"name": "f", "arguments": text}}
        return typed([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]["tool_calls"][0]["function"]

    assert arguments('{"a": 1}') == {"name": "f", "arguments": {"a": 1}}
    for wrong in ("", "{", "5", "[1]", "[" * 100_000, '{"a":' * 2000):
        assert arguments(wrong)["arguments"] == wrong


def test_null_content_is_null_to_a_template_that_asks_and_else_nothing() -> None:
    said = typed([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert ChatTemplate("{{ messages[0].content is none }}", {}).render(said) == "True"
    assert ChatTemplate("<{{ messages[0].content }}>", {}).render(said) == "<>"
    assert ChatTemplate("{{ 'x' + messages[0].content }}", {}).render(said) == "x"


# -- bounds ----------------------------------------------------------------------------------------------------

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{{ 'a' * 10**12 }}",
    "{{ 7 ** (10 ** 9) }}",
    "{% for a in range(9999999999) %}{% endfor %}",
    "{% for a in range(99999) if range(99999) | select('odd') | list %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_out_of_proportion_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.conductor.gateway.meter.CPU_SECONDS", 0.2)
    with pytest.raises(InvalidInput) as error:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x" * 100}])
    assert error.value.field == "messages"


def test_a_long_conversation_is_in_proportion() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 5000
    text = ChatTemplate(TEMPLATE, {}).render(messages)
    assert len(text) > 5_000_000


# -- over HTTP -------------------------------------------------------------------------------------------------


async def test_roles_that_do_not_alternate_are_a_400_naming_messages(tmp_path: Path) -> None:
    from services.conductor.gateway.tokenizer import Tokenizer

    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(ALTERNATE)
    async with running(Tokenizer.load(folder)) as api:
        user = {"role": "user", "content": "x"}
        for stream in (False, True):
            status, answer, headers = await api.chat(messages=[user, user], stream=stream)
            assert status == 400
            error = assert_envelope(answer, headers)
            assert error["param"] == "messages"
            assert "must alternate" in error["message"]
        assert (await api.chat(messages=[user]))[0] == 200


async def test_a_template_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.conductor.gateway.tokenizer import Tokenizer

    monkeypatch.setattr("services.conductor.gateway.meter.CPU_SECONDS", 0.3)
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(ENDLESS[0])
    async with running(Tokenizer.load(folder)) as api:
        status, answer, headers = await api.chat()
        assert (status, assert_envelope(answer, headers)["param"]) == (400, "messages")
        assert (await api.complete())[0] == 200


async def test_a_conversation_with_tools_is_served(start: StartApi) -> None:
    api: Api = await start()
    api.says("ok")
    assert (await api.chat(messages=CONVERSATIONS[3]))[0] == 200
    assert api.dispatcher.asked[0].tokens.tolist() == api.tokenizer.chat(typed(CONVERSATIONS[3])).tolist()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "name": "f", "content": "x"}, "role"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, "content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0].type"),
    ],
)
async def test_a_bad_message_is_refused_by_name(api: Api, message: dict[str, Any], param: str) -> None:
    status, answer, headers = await api.chat(messages=[{"role": "user", "content": "x"}, message])
    assert status == 400
    assert assert_envelope(answer, headers)["param"] == f"messages[1].{param}"


async def test_the_roles_that_are_taken_are_named(api: Api) -> None:
    _, answer, _ = await api.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "function"}]})
    assert all(role in answer["error"]["message"] for role in ("'function'", "user", "tool"))
