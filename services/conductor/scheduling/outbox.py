"""What this conductor tells the others of the promises in its ledger. Pure; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.messages import Promise, Step

NONE = Step(0)


@dataclass
class Standing:
    """A promise, when it was made, and the steps that were taken of it."""

    promise: Promise
    at: float
    steps: Step = NONE


@dataclass(frozen=True)
class News:
    """Since the last time: promises made, and steps taken of those told before."""

    placed: list[Promise]
    steps: list[tuple[int, int]]


class Outbox:
    """``standing`` by number. Whether anybody listens is the shell's to know: ``news`` is taken or lost."""

    def __init__(self) -> None:
        self.standing: dict[int, Standing] = {}
        self._placed: dict[int, Promise] = {}
        self._steps: dict[int, Step] = {}

    def told(self, promise: Promise, step: Step, now: float) -> None:
        """``step`` 0: it was made."""
        number = promise.number
        if not step:
            self.standing[number] = Standing(promise, now)
            self._placed[number] = promise
            return
        if step is Step.OVER:
            del self.standing[number]
            if self._placed.pop(number, None):  # nobody has heard of it
                self._steps.pop(number, None)
                return
        else:
            self.standing[number].steps |= step
        self._steps[number] = self._steps.get(number, Step(0)) | step

    def news(self) -> News | None:
        """What there is to tell, once."""
        if not self._placed and not self._steps:
            return None
        news = News(list(self._placed.values()), [(number, int(step)) for number, step in self._steps.items()])
        self._placed, self._steps = {}, {}
        return news

    def all(self, now: float) -> list[Promise]:
        """Everything that stands, times as they are left."""
        return [_left(one, 1000 * (now - one.at)) for one in self.standing.values()]


def _left(one: Standing, passed: float) -> Promise:
    promise = one.promise
    return msgspec.structs.replace(
        promise,
        ready_ms=max(promise.ready_ms - passed, 0.0),
        fetched_ms=max(promise.fetched_ms - passed, 0.0),
        due_ms=max(promise.due_ms - passed, 0.0),
        by_ms=max(promise.by_ms - passed, 0.0),
        keys=b"",
        steps=int(one.steps),
    )
