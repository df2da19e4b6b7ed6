"""How much later than predicted things really are, for all but a few: what admission adds to a prediction. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.95
"""Of those that are accepted at the very edge of their objective, so many should meet it."""
STEP = 0.2
SMOOTHING = 0.05
LEAST = 0.001
MOST_OF_OBJECTIVE = 0.2
"""So much of an objective at most: what is far off is for the model to learn, not for admission to pay."""


@dataclass
class Margin:
    """A running quantile: it rises a long step with each one that was later, and falls a short one with each other, so
    that it rests where ``SHARE`` of them were not later. ``seconds`` is negative where nearly all were early.
    ``spread``: mean size of the errors, which the steps go by."""

    seconds: float = 0.0
    spread: float = 0.0

    def observe(self, late: float) -> None:
        """``late``: seconds by which the actual time exceeded the predicted one."""
        self.spread += SMOOTHING * (abs(late) - self.spread)
        step = STEP * max(self.spread, LEAST)
        self.seconds += step * (SHARE if late > self.seconds else SHARE - 1)

    def of(self, objective: float) -> float:
        """What is added to a prediction that is held against ``objective``."""
        return min(max(self.seconds, 0.0), MOST_OF_OBJECTIVE * objective)
