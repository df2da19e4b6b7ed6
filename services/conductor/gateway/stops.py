"""Stop strings over a text that arrives in pieces of any cut. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that can no longer be part of a stop string, and whether one was found (the text ends before it)."""

    text: str
    stopped: bool


def failure_table(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: length of the longest proper border of every prefix of ``stop``."""
    table, length = [0] * len(stop), 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        length += stop[at] == stop[length]
        table[at] = length
    return table


class StopStrings:
    """Finds the stop string that is complete first; of several that end at the same character, the longest.

    What is found does not depend on how the text is cut, so a streamed answer equals one that is not. Text is
    held back only while it is the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, failure_table(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> Released:
        """Take the next piece; must not be called again after it said ``stopped``."""
        if not self._stops:
            return Released(text, False)
        buffer = self._held + text
        for at, character in enumerate(text, len(self._held)):
            complete = self._advance(character)
            if complete:
                self._held = ""
                return Released(buffer[: at + 1 - complete], True)
        keep = max(self._matched)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return Released(buffer[:cut], False)

    def flush(self) -> str:
        """The text has ended: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that ends with this character, 0 for none."""
        complete = 0
        for index, (stop, table) in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = table[length - 1]
            length += stop[length] == character
            self._matched[index] = length
            if length == len(stop):
                complete = max(complete, length)
        return complete
