"""Generators of workloads: multi-turn chat, hot prefixes, and prompts that share nothing. Endless, by seed.

Arrivals are Poisson processes; lengths are log-normal with a mean and a coefficient of variation. As in the paper's
traces, a block that is only partly filled has an id of its own: what a later turn shares ends at the last whole block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count

from shared.workload.draws import Draws
from shared.workload.trace import BLOCK, TraceRequest, blocks


@dataclass(frozen=True)
class Lengths:
    """Tokens of a part of a prompt, or of an answer: log-normal. ``most`` bounds them."""

    mean: float
    variation: float = 1.0
    most: int = 1 << 17

    def __post_init__(self) -> None:
        if not (self.mean >= 1 and self.variation >= 0 and self.most >= 1):
            raise ValueError(f"lengths of mean {self.mean:g}, variation {self.variation:g}, at most {self.most}")

    def draw(self, draws: Draws) -> int:
        return draws.length(self.mean, self.variation, self.most)


@dataclass(frozen=True)
class Chat:
    """Conversations that begin as a Poisson process. A turn's prompt is all that was said before, answers included, and
    what the user says now. With the defaults, a request has 12,000 input and 340 output tokens in the mean, as in the
    paper's conversation trace; an endless cache has 60 % of the input (in that trace 37 %)."""

    rate: float = 1.0
    """Requests per second in the long run, over all conversations."""
    turns: float = 2.5
    """Mean number of turns (geometric)."""
    think_s: float = 60.0
    """Mean seconds from one turn's arrival to the next (exponential)."""
    system_tokens: int = BLOCK
    """Tokens that all conversations begin with."""
    first: Lengths = Lengths(8000)
    """What the user says first: most of what a conversation is about."""
    user: Lengths = Lengths(2000)
    """What the user says in further turns."""
    output: Lengths = Lengths(340, most=2000)
    most_input: int = 1 << 17
    """A conversation ends before a prompt gets longer than that."""

    def __post_init__(self) -> None:
        _check(self.rate, self.turns >= 1 and self.think_s >= 0 and 0 <= self.system_tokens < self.most_input)


@dataclass(frozen=True)
class HotPrefix:
    """Prompts that begin with one of a few long prefixes, some of them far more often than others."""

    rate: float = 1.0
    prefixes: int = 8
    prefix_tokens: int = 16 * BLOCK
    skew: float = 1.0
    """Zipf's exponent: the k-th prefix is asked for k^-skew as often as the first; 0: all alike."""
    suffix: Lengths = Lengths(256)
    """What follows the prefix, different in every request."""
    output: Lengths = Lengths(150, most=2000)

    def __post_init__(self) -> None:
        _check(self.rate, self.prefixes >= 1 and self.prefix_tokens >= 1 and self.skew >= 0)


@dataclass(frozen=True)
class Unshared:
    """Prompts that have nothing in common: no cache helps."""

    rate: float = 1.0
    input: Lengths = Lengths(4000)
    output: Lengths = Lengths(150, most=2000)

    def __post_init__(self) -> None:
        _check(self.rate, True)


def chat(shape: Chat, seed: int = 0) -> Iterator[TraceRequest]:
    """Requests in the order of their arrival, without end."""
    draws, ids = Draws(seed, "chat"), count(blocks(shape.system_tokens))
    open_turns: list[tuple[float, int, _Conversation]] = []
    begins, number = 0.0, count()
    while True:
        while not open_turns or begins <= open_turns[0][0]:
            heapq.heappush(open_turns, (begins, next(number), _Conversation.begun(shape, draws)))
            begins += draws.wait(shape.turns / shape.rate)
        arrival, _, talk = heapq.heappop(open_turns)
        yield talk.turn(arrival, shape.output.draw(draws), ids)
        talk.text += shape.user.draw(draws)
        if talk.turns and talk.text <= shape.most_input:
            heapq.heappush(open_turns, (arrival + draws.wait(shape.think_s), next(number), talk))


def hot_prefix(shape: HotPrefix, seed: int = 0) -> Iterator[TraceRequest]:
    """Requests in the order of their arrival, without end."""
    draws = Draws(seed, "hot-prefix")
    weights = [rank**-shape.skew for rank in range(1, shape.prefixes + 1)]
    shares = [upto / sum(weights) for upto in accumulate(weights)]
    whole = shape.prefix_tokens // BLOCK
    ids, arrival = count(whole * shape.prefixes), 0.0
    while True:
        hot = draws.rank(shares)
        tokens = shape.prefix_tokens + shape.suffix.draw(draws)
        chain = (*range(hot * whole, (hot + 1) * whole), *(next(ids) for _ in range(blocks(tokens) - whole)))
        yield TraceRequest(arrival, tokens, shape.output.draw(draws), chain)
        arrival += draws.wait(1 / shape.rate)


def unshared(shape: Unshared, seed: int = 0) -> Iterator[TraceRequest]:
    """Requests in the order of their arrival, without end."""
    draws, ids, arrival = Draws(seed, "unshared"), count(), 0.0
    while True:
        tokens = shape.input.draw(draws)
        yield TraceRequest(arrival, tokens, shape.output.draw(draws), tuple(next(ids) for _ in range(blocks(tokens))))
        arrival += draws.wait(1 / shape.rate)


@dataclass
class _Conversation:
    """``text``: tokens of the prompt that comes next. ``chain``: ids of its blocks that were whole before."""

    turns: int
    text: int
    chain: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls, shape: Chat, draws: Draws) -> _Conversation:
        text = min(shape.most_input, shape.system_tokens + shape.first.draw(draws))
        return cls(draws.count(shape.turns), text, list(range(shape.system_tokens // BLOCK)))

    def turn(self, arrival: float, output: int, ids: count[int]) -> TraceRequest:
        """The request of the next turn; afterwards its answer belongs to the text."""
        chain = (*self.chain, *(next(ids) for _ in range(blocks(self.text) - len(self.chain))))
        request = TraceRequest(arrival, self.text, output, chain)
        self.chain = list(chain[: self.text // BLOCK])
        self.text += output
        self.turns -= 1
        return request


def _check(rate: float, rest: bool) -> None:
    if not (rate > 0 and rest):
        raise ValueError("rate must be positive, and counts and lengths what they say")
