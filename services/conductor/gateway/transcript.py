"""The answer of one choice as it grows: tokens in, text out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.conductor.gateway.detokenizer import Detokenizer
from services.conductor.gateway.stops import StopStrings
from shared.errors import AttemptFailed
from shared.messages import Output, Sampling


class Piece(NamedTuple):
    """Text that one token made certain (perhaps none), and why the answer ends with it ("" while it goes on)."""

    text: str
    finish: str


class Transcript:
    """Stop strings count from output ``min_tokens`` on. A token that ends the answer by its id has no text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], sampling: Sampling) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._stop_ids = frozenset(sampling.stop_ids)
        self._unstoppable = sampling.min_tokens
        self.tokens = 0
        self.finish = ""

    def feed(self, output: Output) -> Piece:
        """The next token. Not to be called again once a piece had a finish reason. Raises AttemptFailed when the
        engine ended the answer with an error."""
        if output.finish == "error":
            raise AttemptFailed("the engine failed while it answered")
        self.tokens += 1
        ends_silently = output.finish == "stop" and output.token in self._stop_ids
        fresh = "" if ends_silently else self._detokenizer.feed(output.token)
        if output.finish:
            fresh += self._detokenizer.flush()
        if self.tokens < self._unstoppable:
            return self._piece(fresh, output.finish)
        text, stopped = self._stops.feed(fresh)
        if stopped:
            return self._piece(text, "stop")
        return self._piece(text + self._stops.flush() if output.finish else text, output.finish)

    def _piece(self, text: str, finish: str) -> Piece:
        self.finish = finish
        return Piece(text, finish)
