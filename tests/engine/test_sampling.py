"""Drawing: against plain definitions of every setting, and the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shared.engines.base import Draw
from shared.engines.sampling import adjust, draw, finish_reason, is_plain_greedy, probabilities, uniforms
from shared.messages import Sampling
from tests.examples import examples

Row = npt.NDArray[np.float32]
rows = arrays(np.float32, st.integers(2, 40), elements=st.floats(-20, 20, width=32, allow_subnormal=False))


def how(**changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": 16, "seed": 7, **changes})


def ask(position: int = 0, choice: int = 0, outputs: list[int] | None = None, **changes: Any) -> Draw:
    tokens = None if outputs is None else np.array(outputs, dtype=np.uint32)
    return Draw(how(**changes), position, choice, np.array([0, 1], dtype=np.uint32), tokens)


def logits(size: int = 500, seed: int = 0, spread: float = 3.0) -> Row:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


@given(rows)
def test_greedy_takes_the_first_largest(row: Row) -> None:
    assert draw(row, ask(temperature=0.0)).token == int(np.argmax(row))


@given(rows, st.integers(1, 50))
def test_top_k_keeps_the_largest_k_and_their_ties(row: Row, k: int) -> None:
    kept = probabilities(row, how(top_k=k)) > 0
    floor = np.sort(row)[::-1][min(k, len(row)) - 1]
    assert set(np.flatnonzero(row > floor)) <= set(np.flatnonzero(kept)) <= set(np.flatnonzero(row >= floor - 1e-4))
    assert kept.sum() >= min(k, len(row)) or (probabilities(row, how()) > 0).sum() < k


@given(rows, st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_that_reach_p(row: Row, p: float) -> None:
    every, kept = probabilities(row, how()), probabilities(row, how(top_p=p))
    chosen = every[kept > 0]
    assert chosen.sum() >= p * every.sum() * (1 - 1e-12)
    larger = chosen[chosen > chosen.min()]  # without the smallest kept ones it would not reach p
    assert larger.sum() < p * every.sum()
    assert every[kept == 0].max(initial=0.0) < chosen.min()


def test_top_p_is_exact_where_the_first_guess_is_too_small() -> None:
    row = logits(5000, spread=0.1)
    every, kept = probabilities(row, how()), probabilities(row, how(top_p=0.9))
    descending = np.sort(every)[::-1]
    count = int(np.searchsorted(np.cumsum(descending), 0.9 * every.sum())) + 1
    assert count > 2048
    assert (kept > 0).sum() == count


@given(rows, st.floats(0.001, 1.0))
def test_min_p_is_relative_to_the_most_likely(row: Row, least: float) -> None:
    every = probabilities(row, how())
    assert np.array_equal(probabilities(row, how(min_p=least)) > 0, every >= least)


@given(rows, st.floats(0.05, 5.0))
def test_temperature_scales_logits(row: Row, temperature: float) -> None:
    expected = np.exp((row.astype(np.float64) - row.max()) / temperature)
    np.testing.assert_allclose(probabilities(row, how(temperature=temperature)), expected, rtol=1e-4, atol=1e-30)


@given(rows, st.integers(0, 5), st.integers(0, 3))
def test_settings_combined_never_empty_what_may_be_drawn(row: Row, position: int, choice: int) -> None:
    what = ask(position, choice, temperature=0.01, top_k=1, top_p=0.01, min_p=1.0)
    assert row[draw(row, what).token] >= row.max() - 1e-4  # closer logits are ties at any temperature


def test_draws_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    counts = Counter(draw(row, ask(position)).token for position in range(4000))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 4000 - share) < 4 * np.sqrt(share * (1 - share) / 4000)


def test_uniforms_are_even_and_differ_by_seed_choice_and_position() -> None:
    values = [uniforms(seed, choice, at, 4) for seed in range(10) for choice in range(10) for at in range(20)]
    flat = np.concatenate(values)
    assert len(set(flat.tolist())) == len(flat)
    assert abs(float(flat.mean()) - 0.5) < 0.03
    assert ((flat > 0) & (flat < 1)).all()
    assert np.array_equal(uniforms(-1, 0, 0, 4), uniforms(2**64 - 1, 0, 0, 4))
    assert np.array_equal(uniforms(1, 2, 3, 4), uniforms(1, 2, 3, 9)[:4])


def test_rounding_errors_hardly_ever_change_a_draw() -> None:
    """Two nodes compute the same logits to the last bits only: on a flat distribution over a large vocabulary the same
    tokens must be drawn all the same."""
    rng = np.random.default_rng(5)
    row = (rng.standard_normal(50_000) * 1.5).astype(np.float32)
    noisy = [row + (rng.standard_normal(len(row)) * 1e-5).astype(np.float32) for _ in range(4)]
    differing = sum(draw(row, ask(at)).token != draw(other, ask(at)).token for at in range(250) for other in noisy)
    assert differing <= 1


@given(rows, st.integers(0, 2**64 - 1), st.integers(0, 8), st.integers(0, 10_000))
def test_draw_depends_on_nothing_but_its_arguments(row: Row, seed: int, choice: int, position: int) -> None:
    """A resumed request draws the same: no state is carried from one position to the next."""
    what = ask(position, choice, seed=seed, top_p=0.9, top_k=20)
    before = row.copy()
    assert draw(row, what) == draw(row, what)
    assert np.array_equal(row, before)


def test_processes_draw_the_same() -> None:
    code = (
        "import json, numpy as np\n"
        "from shared.engines.base import Draw\nfrom shared.engines.sampling import draw\n"
        "from shared.messages import Sampling\n"
        "row = (np.random.default_rng(0).standard_normal(500) * 3).astype(np.float32)\n"
        "s = Sampling(max_tokens=9, seed=7, top_p=0.95)\n"
        "print(json.dumps([draw(row, Draw(s, i, c)).token for i in range(50) for c in range(2)]))\n"
    )
    seen = [
        json.loads(subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}))
        for seed in ("1", "2")
    ]
    here = [draw(logits(), ask(i, c, top_p=0.95)).token for i in range(50) for c in range(2)]
    assert seen == [here, here]
    assert len(set(here)) > 10


def test_penalties_follow_their_definitions() -> None:
    row = np.array([2.0, -2.0, 3.0, 1.0, 0.0], dtype=np.float32)
    what = ask(3, outputs=[2, 2, 3], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # prompt 0 and 1, outputs 2 (twice) and 3: repetition on all of them, the others on outputs only
    expected = [1.0, -4.0, 1.5 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, 0.0]
    np.testing.assert_allclose(adjust(row, what), expected)


def test_logit_bias_moves_and_forbids() -> None:
    row = logits(50)
    assert draw(row, ask(temperature=0.0, logit_bias={7: 100.0})).token == 7
    best = int(row.argmax())
    assert draw(row, ask(temperature=0.0, logit_bias={best: -100.0, 5000: 1.0})).token != best


@given(rows, st.integers(0, 6))
def test_min_tokens_forbids_stop_ids_until_then(row: Row, position: int) -> None:
    best = int(row.argmax())
    token = draw(row, ask(position, temperature=0.0, min_tokens=3, stop_ids=[best])).token
    assert (token == best) == (position >= 3)


def test_logprobs_are_the_models_own() -> None:
    row = logits(100)
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    drawn = draw(row, ask(temperature=0.3, top_k=2, logprobs=5, logit_bias={3: 5.0}))
    assert drawn.logprob == pytest.approx(expected[drawn.token], rel=1e-5)
    best = np.argsort(-row)[:5]
    assert [entry.token for entry in drawn.top] == best.tolist()
    np.testing.assert_allclose([entry.logprob for entry in drawn.top], expected[best], rtol=1e-5)
    assert draw(row, ask(logprobs=0)).top == ()
    assert draw(row, ask(logprobs=0)).logprob < 0
    assert draw(row, ask()).logprob == 0.0


def test_top_logprobs_of_ties_are_ordered_by_id() -> None:
    drawn = draw(np.zeros(10, dtype=np.float32), ask(logprobs=3))
    assert [entry.token for entry in drawn.top] == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_still_give_a_token(temperature: float) -> None:
    row = logits(50)
    row[::2] = np.nan
    assert draw(row, ask(temperature=temperature, logprobs=1)).token % 2 == 1
    assert 0 <= draw(np.full(50, np.nan, np.float32), ask(temperature=temperature)).token < 50
    hot = logits(50)
    hot[4] = np.inf
    assert draw(hot, ask(temperature=temperature)).token == 4


def test_finish_reason() -> None:
    sampling = how(max_tokens=3, stop_ids=[5], min_tokens=1)
    assert finish_reason(sampling, 4, 0) == ""
    assert finish_reason(sampling, 5, 0) == ""  # below min_tokens it cannot be drawn; if it is there, it is text
    assert finish_reason(sampling, 5, 1) == "stop"
    assert finish_reason(sampling, 4, 2) == "length"
    assert finish_reason(sampling, 5, 2) == "stop"


@settings(max_examples=examples(30))
@given(st.booleans(), st.integers(0, 3))
def test_plain_greedy_is_what_argmax_answers(bias: bool, position: int) -> None:
    what = ask(position, temperature=0.0, logit_bias={1: 1.0} if bias else {}, min_tokens=2, stop_ids=[0])
    assert is_plain_greedy(what) == (not bias and position >= 2)
