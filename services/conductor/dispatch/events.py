"""What can happen to a request in flight; its run takes these one after the other from its inbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.conductor.dispatch.attempts import Side
from shared.errors import MooncakeError
from shared.messages import Load, Output, Ref, Usage


@dataclass(frozen=True)
class Took:
    """An instance accepted the attempt."""

    attempt: int
    side: Side
    load: Load | None


@dataclass(frozen=True)
class Refusal:
    attempt: int
    side: Side
    error: MooncakeError


class Arrived(NamedTuple):
    """A token, pushed or asked for, which came ``at`` this time of the loop's clock. A tuple, since there is one for
    every token."""

    attempt: int
    sender: Ref
    output: Output
    usage: Usage | None
    at: float


@dataclass(frozen=True)
class NotHeld:
    """An instance does not know the attempt any more."""

    attempt: int
    sender: Ref


@dataclass(frozen=True)
class GivenUp:
    attempt: int
    sender: Ref
    error: MooncakeError


@dataclass(frozen=True)
class Died:
    """An instance (this incarnation) is dead."""

    ref: Ref


@dataclass(frozen=True)
class BusChanged:
    up: bool


Event = Took | Refusal | Arrived | NotHeld | GivenUp | Died | BusChanged
