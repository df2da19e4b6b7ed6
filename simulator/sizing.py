"""The smallest cluster that meets objectives on a trace, and how effective other ratios of its nodes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.workload.trace import TraceRequest
from simulator.cluster import Cluster
from simulator.report import effective
from simulator.settings import ClusterSettings

Shape = tuple[int, int]
"""Prefill and decode nodes."""


@dataclass(frozen=True)
class Objective:
    """``share`` of all requests within ``ttft`` and ``tbt`` seconds."""

    ttft: float = 30.0
    tbt: float = 0.2
    share: float = 0.95


@dataclass(frozen=True)
class Tried:
    """``ttft_share``, ``tbt_share``: of all requests, each objective by itself. ``effective``: both."""

    prefill: int
    decode: int
    ttft_share: float
    tbt_share: float
    effective: float


class Sizing:
    """``shape``: what is run but for its size. ``tried`` hears of every run. ``most``: nodes of each role."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        objective: Objective,
        shape: ClusterSettings,
        most: int = 512,
        tried: Callable[[Tried], None] = lambda run: None,
    ) -> None:
        self._trace, self._objective, self._settings, self._most, self._told = trace, objective, shape, most, tried
        self._runs: dict[Shape, Tried] = {}

    def smallest(self) -> Tried | None:
        """As many prefill nodes as TTFT needs where decode has plenty, then as many decode nodes as TBT needs; one more
        of what is missed most while both together fall short. None where ``most`` nodes of each are too few."""
        share = self._objective.share
        prefill = self._least(lambda n: self.run(n, self._plenty(n)).ttft_share >= share)
        if prefill is None:
            return None
        decode = self._least(lambda n: self.run(prefill, n).tbt_share >= share)
        while decode is not None and max(prefill, decode) <= self._most:
            found = self.run(prefill, decode)
            if found.effective >= share:
                return self._trimmed(found)
            if found.ttft_share < found.tbt_share:
                prefill += 1
            else:
                decode += 1
        return None

    def curve(self, nodes: int, around: int, width: int = 3) -> list[Tried]:
        """All ratios of so many nodes with ``around`` prefill nodes, give or take ``width``."""
        return [self.run(n, nodes - n) for n in range(max(1, around - width), min(nodes - 1, around + width) + 1)]

    def run(self, prefill: int, decode: int) -> Tried:
        known = self._runs.get((prefill, decode))
        if known:
            return known
        settings = self._settings
        shape = type(settings)(**{name: getattr(settings, name) for name in settings.__struct_fields__} | {
            "prefill": prefill * settings.group, "decode": decode,
        })  # fmt: skip
        requests = Cluster(shape).run(self._trace)
        goal, count = self._objective, len(requests)
        done = [one for one in requests if one.ended == "done"]
        found = self._runs[prefill, decode] = Tried(
            prefill * settings.group,
            decode,
            sum(one.ttft <= goal.ttft for one in done) / count,
            sum(one.tbt <= goal.tbt for one in done) / count,
            effective(requests, goal.tbt, goal.ttft),
        )
        self._told(found)
        return found

    def _trimmed(self, found: Tried) -> Tried:
        """Other ratios may do with one node less."""
        share = self._objective.share
        nodes = found.prefill // self._settings.group + found.decode - 1
        for prefill in (found.prefill // self._settings.group + step for step in (0, -1, 1)):
            if 0 < prefill < nodes and (better := self.run(prefill, nodes - prefill)).effective >= share:
                return self._trimmed(better)
        return found

    def _plenty(self, prefill: int) -> int:
        return max(8, 2 * prefill)

    def _least(self, enough: Callable[[int], bool]) -> int | None:
        """Doubling, then halving; None beyond ``most``."""
        high = 1
        while not enough(high):
            if high >= self._most:
                return None
            high = min(2 * high, self._most)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            if enough(middle):
                high = middle
            else:
                low = middle
        return high
