"""What stage 0 of admission is told of a request before anything of it is tokenized."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.conductor.gateway.ask import ask_chat, ask_completion
from services.conductor.gateway.body import MAX_PRIORITY, ChatBody, CompletionBody, decode_body
from services.conductor.gateway.completer import LONG_BODY
from services.conductor.gateway.tokenizer import Tokenizer
from shared.errors import Contended
from tests.gateway.fakes import CHAT, MODEL, Api
from tests.held import held_now


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("xx " * 799, 299),
        ("x" * 799, 1),
        (" " * 8000, 0),
        ([1, 2, 3], 3),
        ([[1] * 50, [1] * 90], 50),  # the first decides for all
        (["x " * 40, "x " * 4000], 10),
        ("ю " * 40, 10),
        ("x", 0),
    ],
)
def test_a_prompt_has_so_many_tokens_at_least(prompt: Any, tokens: int) -> None:
    body = decode_body(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionBody)
    assert ask_completion(body).least_tokens == tokens


def test_a_conversation_has_those_of_its_turns_that_no_template_shortens() -> None:
    called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "x " * 40}]},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": "1", "content": "x " * 80},
        {"role": "assistant", "content": "<think>" + "x " * 800 + "</think> x"},
        {"role": "user", "content": ""},
    ]
    body = decode_body(json.dumps({"model": "m", "messages": turns}).encode(), ChatBody)
    assert ask_chat(body).least_tokens == 30


@pytest.mark.parametrize(
    "text",
    [
        " " * 8000,
        "=" * 8000,
        "-" * 4000 + "\n" + "-" * 4000,
        ("        " * 6 + "return\n") * 100,
        "internationalization responsibilities " * 50,
        "The capital of France is Paris. " * 100,
        "ю" * 800,
        "def f(x):\n\treturn [x for x in range(10)]\n" * 50,
    ],
)
def test_no_prompt_has_fewer_tokens_than_it_is_said_to(tokenizer: Tokenizer, text: str) -> None:
    body = decode_body(json.dumps({"model": "m", "prompt": text}).encode(), CompletionBody)
    assert ask_completion(body).least_tokens <= len(tokenizer.text(text))


async def test_nothing_that_is_refused_is_tokenized(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size: a refusal costs next to nothing, or an overload is one of this server, too."""
    told: list[tuple[int, int, int]] = []

    def refuse(
        prompt_bytes: int, slo_ttft_ms: int = 0, ticket: int = 0, prompt_tokens: int = 0, priority: int = 0
    ) -> None:
        told.append((prompt_bytes, prompt_tokens, priority))
        raise Contended("busy", field="no_room", retry_after_ms=1500)

    def tokenize(*_: object, **__: object) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(api.dispatcher, "consider", refuse)
    monkeypatch.setattr(Tokenizer, "text", tokenize)
    monkeypatch.setattr(Tokenizer, "render", tokenize)
    long = {"model": MODEL, "prompt": "x" * LONG_BODY}
    for path, body, tokens, urgent in (
        ("/v1/chat/completions", CHAT, len("hello") // 8, 0),
        ("/v1/completions", {"model": MODEL, "prompt": "x " * 4000, "priority": -3}, 1000, 3),
        ("/v1/completions", long, 0, 0),  # before it is parsed
        ("/v1/completions", long | {"priority": -3}, 0, MAX_PRIORITY),
    ):
        status, answer, headers = await api.post(path, body)
        assert (status, answer["error"]["reason"], headers["Retry-After-Ms"]) == (429, "no_room", "1500")
        size, *least = told.pop()
        assert least == [tokens, urgent] and size > 8 * tokens and not told
    assert not held_now()["tokenize_jobs"] and not api.dispatcher.asked
