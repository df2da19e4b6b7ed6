"""The real model: it answers, and each turn of a chat finds the whole of the turn before in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.model]
B, TURNS = 32, 6
QUESTIONS = (
    "What is the capital of France?",
    "Which river runs through it, and into which sea does that river flow in the end? Answer in one sentence please.",
    "Name three famous buildings of that city and say in a few words for each of them why people like to visit it.",
    "Which of these three is the oldest one, and what was it built for at first? Answer in one or two sentences.",
    "How would you plan a single day there for somebody who likes museums, parks and quiet cafes more than shops?",
    "Now sum up everything that we have said about this city in two sentences that a child of ten would understand.",
)


async def test_a_chat_of_six_turns_reuses_all_of_the_turn_before(real_up: Callable[..., Mesh]) -> None:
    mesh = real_up()
    messages: list[dict[str, Any]] = []
    before = 0
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        answer = await mesh.ask(
            messages, path="/v1/chat/completions", model="SmolLM2-135M-Instruct", max_tokens=24, stream=bool(turn % 2)
        )
        assert answer.status == 200, answer.error
        if turn == 0:
            assert "Paris" in answer.text
        assert answer.cached >= before // B * B, f"turn {turn}"
        total = answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]
        assert total - before >= B
        before = total
        messages.append({"role": "assistant", "content": answer.text})
