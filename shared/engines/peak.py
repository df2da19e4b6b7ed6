"""The most floating point operations a second that this machine's matrix products reach, measured."""

from __future__ import annotations

import time

SIZE = 1024
SECONDS = 0.5


def measured_peak(dtype: str, threads: int, device: str) -> float:
    """The best of products of two square matrices in half a second, in the library of the engine `transformers` and
    with its threads. Raises ImportError without it."""
    import torch

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    size = SIZE if device == "cpu" else 8 * SIZE
    left, right = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until or best == float("inf"):
        begun = time.perf_counter()
        (left @ right).sum().item()
        best = min(best, time.perf_counter() - begun)
    return float(2 * size**3 / best)
