"""How many examples Hypothesis draws: tests give what is usual, ``--hypothesis-profile`` multiplies it."""

from __future__ import annotations

from hypothesis import settings

USUAL = 50
"""``max_examples`` of the profile ``usual`` (tests/conftest.py)."""


def examples(usual: int) -> int:
    """``max_examples`` of a test by the profile that is loaded."""
    return max(1, usual * settings.default.max_examples // USUAL) if settings.default else usual
