"""Random draws of the generators, by inverse distribution functions: a seed means the same everywhere."""

from __future__ import annotations

import math
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


class Draws:
    """Draws from one seed. Only ``Random.random`` is used, whose sequence Python promises to keep."""

    def __init__(self, seed: int, name: str) -> None:
        self._uniform = Random(f"{name}/{seed}").random

    def wait(self, mean: float) -> float:
        """Exponential: the time until the next event of a Poisson process. Mean 0 is always 0."""
        return -mean * math.log(1.0 - self._uniform())

    def length(self, mean: float, variation: float, most: int) -> int:
        """Log-normal with that mean and coefficient of variation, rounded, 1 to ``most``. Variation 0: the mean."""
        sigma2 = math.log1p(variation * variation)
        normal = _NORMAL.inv_cdf(max(self._uniform(), 1e-12))
        return min(most, max(1, round(mean * math.exp(math.sqrt(sigma2) * normal - sigma2 / 2))))

    def count(self, mean: float) -> int:
        """Geometric from 1 on, with that mean, which is at least 1."""
        if mean <= 1.0:
            return 1
        return 1 + int(math.log(1.0 - self._uniform()) / math.log1p(-1.0 / mean))

    def rank(self, shares: list[float]) -> int:
        """An index, each as likely as its share; ``shares`` are cumulated, the last one 1."""
        u = self._uniform()
        return next((i for i, upto in enumerate(shares) if u < upto), len(shares) - 1)
