"""How many examples Hypothesis draws: tests name what is plenty, a profile takes its part of that, or multiplies it."""

from __future__ import annotations

from hypothesis import settings

PLENTY = 50
"""``max_examples`` of a profile that would draw what tests give; those that there are: tests/conftest.py."""


def examples(plenty: int) -> int:
    """``max_examples`` of a test by the profile that is loaded."""
    return max(1, plenty * settings.default.max_examples // PLENTY) if settings.default else plenty
