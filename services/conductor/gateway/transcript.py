"""The answer of one choice as it grows: tokens in, text out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.conductor.gateway.detokenizer import Detokenizer
from services.conductor.gateway.stops import StopStrings
from services.conductor.gateway.trail import Mark, Trail
from shared.errors import AttemptFailed
from shared.messages import Output, Sampling


class Piece(NamedTuple):
    """Text that one token made certain (perhaps none), why the answer ends with it ("" while it goes on), and the
    tokens that are wholly delivered with it, where they were asked for."""

    text: str
    finish: str
    marks: Sequence[Mark] = ()


class Transcript:
    """Stop strings count from output ``min_tokens`` on. A token that ends the answer by its id has no text, and is not
    among the marks of ``trail``."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], sampling: Sampling, trail: Trail | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._trail = trail
        self._stop_ids = frozenset(sampling.stop_ids)
        self._unstoppable = sampling.min_tokens
        self.tokens = 0
        self.finish = ""

    def feed(self, output: Output) -> Piece:
        """The next token. Not to be called again once a piece had a finish reason. Raises AttemptFailed when the
        engine ended the answer with an error."""
        finish = output.finish
        if finish == "error":
            raise AttemptFailed("the engine failed while it answered")
        self.tokens += 1
        silent = finish == "stop" and output.token in self._stop_ids
        text = "" if silent else self._detokenizer.feed(output.token)
        if finish:
            text += self._detokenizer.flush()
        if self._trail is not None:
            if not silent:
                self._trail.add(output.token, output.logprob, output.top)
            self._trail.complete(text)
        stopped = False
        if self._stops is not None and self.tokens >= self._unstoppable:
            text, stopped = self._stops.feed(text)
            if not stopped and finish:
                text += self._stops.flush()
        self.finish = "stop" if stopped else finish
        if self._trail is None:
            return Piece(text, self.finish)
        return Piece(text, self.finish, self._marks(self._trail, text, stopped))

    def _marks(self, trail: Trail, text: str, stopped: bool) -> list[Mark]:
        marks = trail.delivered(text)
        return marks + trail.rest() if self.finish and not stopped else marks
