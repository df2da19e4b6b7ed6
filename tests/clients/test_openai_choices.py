"""A11 and A12: several choices, log-probabilities and echo, as the `openai` client's types have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError, OpenAI

from tests.mesh.mesh import MODEL

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

pytestmark = [pytest.mark.mesh]

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a river."}]
PROMPT = "The quick brown fox"


@pytest.mark.parametrize("logprobs", [False, True])
def test_choices_of_a_chat(client: OpenAI, logprobs: bool) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 8}
    options |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    whole = client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert whole.usage is not None
    pieces, finishes, tokens = [""] * 3, [""] * 3, [0] * 3
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            finishes[choice.index] += choice.finish_reason or ""
            tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
    assert pieces == texts
    assert finishes == [choice.finish_reason for choice in whole.choices]
    counted = [len((choice.logprobs and choice.logprobs.content) or ()) for choice in whole.choices]
    assert tokens == counted
    assert all(counted) == logprobs


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        assert [top.logprob for top in token.top_logprobs] == sorted(t.logprob for t in token.top_logprobs)[::-1]
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert math.isclose(token.top_logprobs[0].logprob, token.logprob)
        assert bytes(token.bytes or ()).decode(errors="replace") == token.token


def test_log_probabilities_of_a_completion(client: OpenAI, usual: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": [PROMPT, "Another"], "temperature": 0, "max_tokens": 6, "logprobs": 2}
    whole = client.completions.create(**options)
    texts, offsets = ["", ""], [[0][:0], [0][:0]]
    for choice in whole.choices:
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert found.text_offset is not None
        assert "".join(found.tokens) == choice.text
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
        assert all(max(top.values()) >= own for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True))
    for chunk in usual.completions.create(**options, stream=True):
        for piece in chunk.choices:
            texts[piece.index] += piece.text
            offsets[piece.index] += (piece.logprobs and piece.logprobs.text_offset) or []
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs and choice.logprobs.text_offset for choice in whole.choices]


def test_choices_and_echo_of_a_completion(client: OpenAI, usual: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": [PROMPT, "Another"], "n": 2, "seed": 3, "max_tokens": 5, "echo": True}
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(PROMPT) for choice in whole.choices] == [True, True, False, False]
    pieces = [""] * 4
    for chunk in usual.completions.create(**options, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in whole.choices]


def test_what_asks_too_much_is_refused(client: OpenAI) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("n", {"n": 129}),
    ]
    for param, options in refused:
        with pytest.raises(BadRequestError) as raised:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
        assert raised.value.param == param
