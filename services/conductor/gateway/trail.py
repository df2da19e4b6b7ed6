"""Which tokens the delivered text consists of, each with its log-probability. Pure."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.conductor.gateway.pieces import Pieces
from shared.messages import Logprob

_Utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Mark:
    """A token of the answer. ``data`` None: it has no text. ``offset``: characters of the answer before it; tokens that
    share a character begin where that does."""

    token: int
    data: bytes | None
    logprob: float
    top: Sequence[Logprob]
    offset: int


class Trail:
    """Tokens leave when all of their text is delivered; what a stop string cut off, a part of a token too, never does.
    The text comes twice: as it becomes certain (``complete``), and as stop strings let it go (``delivered``)."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._open: list[tuple[int, float, Sequence[Logprob]]] = []
        self._complete: deque[tuple[int, Mark]] = deque()
        self._length = 0
        self._delivered = 0

    def add(self, token: int, logprob: float, top: Sequence[Logprob]) -> None:
        self._open.append((token, logprob, top))
        if len(self._open) == 1 and self._pieces.data(token) is None:
            self._close("")

    def complete(self, text: str) -> None:
        """``text`` became certain with the token that was added last, "" while that ends inside a character."""
        if text:
            self._close(text)

    def delivered(self, text: str) -> list[Mark]:
        """``text`` follows what was delivered before it; returns the tokens that are whole now."""
        self._delivered += len(text)
        marks = []
        while self._complete and self._complete[0][0] <= self._delivered:
            marks.append(self._complete.popleft()[1])
        return marks

    def rest(self) -> list[Mark]:
        """No stop string ended the answer: also the tokens of a character that was left incomplete."""
        self._close("")
        return [mark for _, mark in self._complete]

    def _close(self, text: str) -> None:
        """``text`` is that of all tokens since the last whole character."""
        decoder, position, end = _Utf8("replace"), 0, len(text)
        for token, logprob, top in self._open:
            data = self._pieces.data(token)
            mark = Mark(token, data, logprob, top, self._length + min(position, end))
            position += len(decoder.decode(data or b""))
            begun = bool(decoder.getstate()[0])  # a character that later tokens complete
            self._complete.append((self._length + min(position + begun, end), mark))
        self._open.clear()
        self._length += end
