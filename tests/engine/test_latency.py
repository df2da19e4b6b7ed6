"""Latency models: recovered from what they generate, never negative, and corrected by what happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.latency import (
    HALF_LIFE_S,
    DecodeModel,
    DecodeSample,
    OnlineCorrection,
    PrefillModel,
    PrefillSample,
    decode_r2,
    fit_decode,
    fit_prefill,
    prefill_r2,
)

SHAPES = [(32, 0), (128, 0), (1056, 1024), (256, 0), (2080, 2048), (4096, 0), (4096, 2048)]
coefficient = st.floats(1e-7, 1e-1)


@given(coefficient, coefficient, st.floats(1e-9, 1e-5))
def test_prefill_coefficients_are_recovered(base: float, linear: float, square: float) -> None:
    true = PrefillModel(base, linear, square)
    samples = [PrefillSample(n, p, true.seconds(n, p)) for n, p in SHAPES]
    found = fit_prefill(samples)
    for n, p in SHAPES:
        assert found.seconds(n, p) == pytest.approx(true.seconds(n, p), rel=1e-6)
    assert prefill_r2(found, samples) == pytest.approx(1.0, abs=1e-6)


@given(coefficient, coefficient, st.floats(1e-9, 1e-5))
def test_decode_coefficients_are_recovered(base: float, each: float, token: float) -> None:
    true = DecodeModel(base, each, token)
    samples = [DecodeSample(b, b * c, true.seconds(b, b * c)) for b, c in [(1, 64), (8, 64), (4, 1024), (1, 4000)]]
    found = fit_decode(samples)
    for batch, kv, seconds in samples:
        assert found.seconds(batch, kv) == pytest.approx(seconds, rel=1e-6)
    assert decode_r2(found, samples) == pytest.approx(1.0, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 8000), st.floats(1e-4, 60)), min_size=1, max_size=12))
def test_no_coefficient_is_negative_whatever_was_measured(rows: list[tuple[int, int, float]]) -> None:
    found = fit_prefill([PrefillSample(n + p, p, seconds) for n, p, seconds in rows])
    assert min(found.base, found.linear, found.square) >= 0
    longer = [found.seconds(n, 0) for n in (10, 100, 1000, 10_000)]
    assert longer == sorted(longer)


def test_noise_is_averaged_out_and_shows_in_r2() -> None:
    rng = random.Random(0)
    true = PrefillModel(0.05, 0.003, 4e-8)
    samples = [PrefillSample(n, p, true.seconds(n, p) * rng.uniform(0.9, 1.1)) for n, p in SHAPES * 20]
    found = fit_prefill(samples)
    assert found.seconds(3000, 1000) == pytest.approx(true.seconds(3000, 1000), rel=0.05)
    assert 0.9 < prefill_r2(found, samples) < 1.0


def test_few_samples_give_what_they_can_and_none_an_error() -> None:
    one = fit_prefill([PrefillSample(100, 0, 0.5)])
    assert one.seconds(100, 0) == pytest.approx(0.5)
    with pytest.raises(ValueError):
        fit_decode([])


def test_correction_follows_a_lasting_change_and_forgets_it() -> None:
    correction = OnlineCorrection()
    for _ in range(60):
        correction = correction.observed(1.0, 2.0)
    assert correction.factor == pytest.approx(2.0, rel=0.01)
    for _ in range(60):
        correction = correction.observed(1.0, 1.0)
    assert correction.factor == pytest.approx(1.0, rel=0.01)


def test_one_stall_is_no_trend() -> None:
    assert OnlineCorrection().observed(0.1, 500.0).factor < 1.2


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=30))
def test_correction_stays_a_usable_number(pairs: list[tuple[float, float]]) -> None:
    correction = OnlineCorrection()
    for predicted, actual in pairs:
        correction = correction.observed(predicted, actual)
    assert 0.01 <= correction.factor <= 100


@given(st.floats(0.01, 100), st.floats(0, 600), st.floats(0, 600))
def test_a_correction_fades_by_time_alone(factor: float, first: float, then: float) -> None:
    """In however many pieces, and to neither side of 1."""
    learnt = OnlineCorrection(factor)
    faded = learnt.faded(first).faded(then)
    assert faded.factor == pytest.approx(learnt.faded(first + then).factor)
    assert min(1.0, factor) <= faded.factor <= max(1.0, factor)


def test_a_correction_fades_by_half_lives() -> None:
    assert OnlineCorrection(16.0).faded(HALF_LIFE_S).factor == pytest.approx(4.0)
    assert OnlineCorrection(16.0).faded(2 * HALF_LIFE_S).factor == pytest.approx(2.0)
    assert OnlineCorrection(16.0).faded(-1.0).factor == 16.0
