"""Server-sent events of an OpenAI-compatible stream, as they come in pieces: what each of them tells. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from shared.errors import MALFORMED

DONE = b"[DONE]"
LONGEST = 1 << 20
"""Bytes of one line; who sends more does not speak server-sent events."""


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(Struct):
    role: str | None = None
    content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def is_token(self) -> bool:
        """Whether a token came with it: text of any, and of a completion no text too, as long as nothing ends."""
        if self.text is not None:
            return bool(self.text) or self.finish_reason is None
        return self.delta is not None and bool(self.delta.content)


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Usage(NamedTuple):
    """``cached`` None: the server does not say."""

    prompt: int
    cached: int | None
    completion: int


class Told(NamedTuple):
    """What a piece of the stream told. ``error``: what the server said of its failure."""

    tokens: int = 0
    usage: Usage | None = None
    error: str = ""
    done: bool = False


_decoder = msgspec.json.Decoder(_Event)


class Events:
    """Of one answer. :meth:`feed` it with bytes in any pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self.any = False  # whether there was an event yet

    def feed(self, data: bytes) -> Told:
        """What the lines that are complete now tell, all together. Raises ValueError for what is no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ValueError("a line without end")
        tokens, usage, error, done = 0, None, "", False
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            self.any = True
            told = _told(line[5:].strip())
            tokens, usage = tokens + told.tokens, told.usage or usage
            error, done = error or told.error, done or told.done
        return Told(tokens, usage, error, done)


def _told(payload: bytes) -> Told:
    if payload == DONE:
        return Told(done=True)
    try:
        event = _decoder.decode(payload)
    except MALFORMED as problem:
        raise ValueError(f"an event that is none of OpenAI's: {problem}") from None
    if event.error:
        return Told(error=error_text(event.error))
    return Told(sum(choice.is_token() for choice in event.choices), _usage(event.usage))


def error_text(error: Any) -> str:
    """The sentence of OpenAI's error object, or whatever came in its place."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, details.cached_tokens if details else None, usage.completion_tokens)
