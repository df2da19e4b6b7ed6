"""OpenAI's response objects, as bytes. Pure. A chunk is mostly a prefix that is made once per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from services.conductor.gateway.answer import Answer
from services.conductor.gateway.ask import Ask
from services.conductor.gateway.errors import Fault
from services.conductor.gateway.logprobs import ChatLogprobs, Entry, Logprobs, TextLogprobs
from services.conductor.gateway.pieces import Pieces
from services.conductor.gateway.trail import Mark

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Head:
    """What all objects of one answer have in common. ``created``: Unix seconds."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint}


class Shape(Protocol):
    """One endpoint's objects; the chunks come as whole SSE events."""

    def start(self, choice: int, opening: str) -> bytes:
        """Before a choice's first text. ``opening``: text that the answer has before it, mostly none."""

    def text(self, choice: int, text: str, marks: Sequence[Mark]) -> bytes: ...

    def finish(self, choice: int, reason: str) -> bytes: ...

    def usage(self, usage: dict[str, Any]) -> bytes:
        """After all choices."""

    def entries(self, marks: Sequence[Mark]) -> list[Entry]:
        """The log-probabilities of tokens, as :meth:`whole` will want them."""

    def whole(self, answer: Answer) -> bytes:
        """The object of an answer that is not streamed."""


class Chunks:
    """Streamed events around ``choices``. With ``include_usage`` every chunk has a ``usage``, null but in the last."""

    def __init__(self, head: Head, kind: str, include_usage: bool) -> None:
        self._open = b"data: " + _json(head.fields(kind))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, choice: bytes) -> bytes:
        return self._open + choice + self._close

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._open + b'],"usage":' + _json(usage) + b"}\n\n"


class _Choices(ABC):
    """What both endpoints' objects have in common. They differ in the names of their kinds, and in ``field``: what a
    chunk has of a choice, ``last`` in the one that ends it. ``logprobs`` None: they were not asked for."""

    kind, chunk, field, last = "", "", b"", b""

    def __init__(self, head: Head, include_usage: bool, logprobs: Logprobs | None = None) -> None:
        self._head = head
        self._chunks = Chunks(head, self.chunk, include_usage)
        self._logprobs = logprobs

    @abstractmethod
    def piece(self, text: str) -> bytes:
        """A chunk's ``field`` with some of the text."""

    @abstractmethod
    def said(self, text: str) -> dict[str, Any]:
        """What the whole object has of a choice with this text."""

    def text(self, choice: int, text: str, marks: Sequence[Mark]) -> bytes:
        logprobs = _json(_fields(self._logprobs, self.entries(marks))) if marks else b"null"
        return self._event(choice, self.piece(text), b"null", logprobs)

    def finish(self, choice: int, reason: str) -> bytes:
        return self._event(choice, self.last, _json(reason))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._chunks.usage(usage)

    def entries(self, marks: Sequence[Mark]) -> list[Entry]:
        return [] if self._logprobs is None else self._logprobs.entries(marks)

    def whole(self, answer: Answer) -> bytes:
        choices = [
            {
                "index": i,
                **self.said("".join(answer.texts[i])),
                "logprobs": _fields(self._logprobs, answer.logprobs[i]),
                "finish_reason": transcript.finish,
            }
            for i, transcript in enumerate(answer.transcripts)
        ]
        return _json(self._head.fields(self.kind) | {"choices": choices, "usage": answer.usage()})

    def _event(self, choice: int, value: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        parts = (choice, self.field, value, logprobs, reason)
        return self._chunks.event(b'{"index":%d,"%b":%b,"logprobs":%b,"finish_reason":%b}' % parts)


class ChatShape(_Choices):
    """``chat.completion`` and its chunks: the role comes first, alone."""

    kind, chunk, field, last = "chat.completion", "chat.completion.chunk", b"delta", b"{}"

    def start(self, choice: int, opening: str) -> bytes:
        return self._event(choice, b'{"role":"assistant","content":""}', b"null")

    def piece(self, text: str) -> bytes:
        return b'{"content":' + _json(text) + b"}"

    def said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class TextShape(_Choices):
    """``text_completion``, streamed or not."""

    kind, chunk, field, last = "text_completion", "text_completion", b"text", b'""'

    def start(self, choice: int, opening: str) -> bytes:
        return self._event(choice, self.piece(opening), b"null") if opening else b""

    def piece(self, text: str) -> bytes:
        return _json(text)

    def said(self, text: str) -> dict[str, Any]:
        return {"text": text}


def shape(ask: Ask, head: Head, pieces: Pieces) -> Shape:
    """Of the answer to ``ask``."""
    wanted = ask.logprobs >= 0
    if ask.chat:
        return ChatShape(head, ask.include_usage, ChatLogprobs(pieces) if wanted else None)
    return TextShape(head, ask.include_usage, TextLogprobs(pieces) if wanted else None)


def _fields(logprobs: Logprobs | None, entries: Sequence[Entry]) -> dict[str, Any] | None:
    return None if logprobs is None else logprobs.fields(entries)


def error_event(fault: Fault) -> bytes:
    """What a stream ends with instead of ``[DONE]``."""
    return b"data: " + fault.envelope() + b"\n\n"


def model_object(model: str, created: int, context: int | None) -> dict[str, Any]:
    """Entry of ``/v1/models``; ``max_model_len`` as far as it is known."""
    fields = {"id": model, "object": "model", "created": created, "owned_by": "mooncake"}
    return fields if context is None else fields | {"max_model_len": context}


def model_list(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(models)}
