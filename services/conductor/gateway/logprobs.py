"""OpenAI's objects for log-probabilities, one form for each endpoint. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from services.conductor.gateway.pieces import Pieces
from services.conductor.gateway.trail import Mark

LEAST = -9999.0  # JSON has no infinity
Entry = tuple[msgspec.Raw, ...]
_json = msgspec.json.Encoder().encode


class Logprobs(Protocol):
    def entries(self, marks: Sequence[Mark]) -> list[Entry]:
        """What each token adds, as JSON: written when the token comes, since writing those of a long answer at its end
        would hold up the loop."""

    def fields(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The ``logprobs`` of a choice or of a chunk."""


class ChatLogprobs:
    """Bytes that are no whole characters are written ``\\xf0`` in a token's text, and as numbers in ``bytes``; a token
    without text has a name and no bytes."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def entries(self, marks: Sequence[Mark]) -> list[Entry]:
        return [(msgspec.Raw(_json(self._entry(mark))),) for mark in marks]

    def fields(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"content": [entry for (entry,) in entries], "refusal": None}

    def _entry(self, mark: Mark) -> dict[str, Any]:
        top = [self._token(one.token, self._pieces.data(one.token), one.logprob) for one in mark.top]
        return self._token(mark.token, mark.data, mark.logprob) | {"top_logprobs": top}

    def _token(self, token: int, data: bytes | None, logprob: float) -> dict[str, Any]:
        text = self._pieces.name(token) if data is None else data.decode("utf-8", "backslashreplace")
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": None if data is None else list(data)}


COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TextLogprobs:
    """Bytes that are no whole characters are written ``bytes:\\xf0``. The token that was drawn is always among the
    ``top_logprobs``, so there may be one more of them than asked for."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def entries(self, marks: Sequence[Mark]) -> list[Entry]:
        return [tuple(msgspec.Raw(_json(value)) for value in self._row(mark)) for mark in marks]

    def fields(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {column: [entry[i] for entry in entries] for i, column in enumerate(COLUMNS)}

    def _row(self, mark: Mark) -> tuple[str, float, dict[str, float], int]:
        return self._text(mark.token), max(mark.logprob, LEAST), self._top(mark), mark.offset

    def _top(self, mark: Mark) -> dict[str, float]:
        top = {self._text(one.token): max(one.logprob, LEAST) for one in reversed(mark.top)}
        most_likely_first = dict(reversed(top.items()))
        return most_likely_first | {self._text(mark.token): max(mark.logprob, LEAST)}

    def _text(self, token: int) -> str:
        data = self._pieces.data(token)
        if data is None:
            return self._pieces.name(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
