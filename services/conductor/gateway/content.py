"""Prompt and answer as attributes of a request's span, by OpenTelemetry's conventions for generative AI. Pure.

They say what people said, so nothing of this is used unless the operator asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from services.conductor.gateway.ask import Prompt
from shared.blocks import Tokens

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
WANTED = ("true", "span_only", "span_and_event")

MAX_CONTENT = 16_384
"""Characters kept of a request's prompts, and of its answers; of a prompt in token ids, so many tokens at most."""

PART = 64
"""Characters that a part counts for beside its text: many empty ones are not free."""

CUT = "…"

Part = dict[str, Any]
Message = dict[str, Any]


def is_wanted(env: Mapping[str, str]) -> bool:
    return env.get(VARIABLE, "").strip().lower() in WANTED


class Budget:
    """Characters that are left. ``cut``: something did not fit."""

    def __init__(self, limit: int = MAX_CONTENT) -> None:
        self._left = limit
        self.cut = False

    def part(self) -> bool:
        """Room for one more part?"""
        self._left -= PART
        self.cut = self.cut or self._left < 0
        return self._left >= 0

    def text(self, text: str) -> str:
        """As much of it as there is room for."""
        kept = text[: max(self._left, 0)]
        self._left -= len(kept)
        if len(kept) == len(text):
            return text
        self.cut = True
        return kept + CUT


def asked(
    prompts: Sequence[Prompt], decode: Callable[[Tokens], str], limit: int = MAX_CONTENT
) -> dict[str, str | bool]:
    """The attributes of a request's prompts. Where not all fits, the last messages stay. ``decode``: ids to text."""
    budget, kept = Budget(limit), list[Message]()
    for message in reversed([message for prompt in prompts for message in _messages(prompt, decode, limit)]):
        if not budget.part():
            break
        kept.append(_fitted(message, budget))
    return _attributes("gen_ai.input.messages", kept[::-1], budget)


def _messages(prompt: Prompt, decode: Callable[[Tokens], str], limit: int) -> list[Message]:
    if isinstance(prompt, list):
        return prompt
    text = prompt if isinstance(prompt, str) else decode(prompt[-limit:])
    return [{"role": "user", "content": text}]


def _fitted(message: Message, budget: Budget) -> Message:
    """A turn of a conversation in the words of the conventions."""
    text, parts = message.get("content"), list[Part]()
    if message["role"] == "tool":
        called = budget.text(str(message.get("tool_call_id", "")))
        parts.append({"type": "tool_call_response", "id": called, "response": budget.text(text or "")})
    elif text is not None:
        parts.append({"type": "text", "content": budget.text(text)})
    for call in message.get("tool_calls", ()):
        if budget.part():
            parts.append(_call(call, budget))
    named = {"name": budget.text(message["name"])} if message.get("name") else {}
    return {"role": message["role"], "parts": parts} | named


def _call(call: Mapping[str, Any], budget: Budget) -> Part:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    names = {"id": budget.text(call["id"]), "name": budget.text(function["name"])}
    return {"type": "tool_call", **names, "arguments": budget.text(text)}


class Said:
    """What the choices of an answer say, as it comes."""

    def __init__(self, choices: int, limit: int = MAX_CONTENT) -> None:
        self._budget = Budget(limit)
        self._texts: list[list[str]] = [[] for _ in range(choices)]

    def hear(self, choice: int, text: str) -> None:
        if text and not self._budget.cut:
            self._texts[choice].append(self._budget.text(text))

    def attributes(self, finishes: Sequence[str]) -> dict[str, str | bool]:
        """``finishes``: why each choice ended, "" for one that was broken off."""
        messages = [
            {
                "role": "assistant",
                "parts": [{"type": "text", "content": "".join(texts)}],
                "finish_reason": finish or "error",
            }
            for texts, finish in zip(self._texts, finishes, strict=True)
        ]
        return _attributes("gen_ai.output.messages", messages, self._budget)


def _attributes(name: str, messages: Sequence[Message], budget: Budget) -> dict[str, str | bool]:
    cut = {f"mooncake.{name.rpartition('.')[0].rpartition('.')[2]}_cut": True} if budget.cut else {}
    return {name: msgspec.json.encode(messages).decode(), **cut}
