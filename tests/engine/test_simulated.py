"""The simulated engine: real bytes in the pool, words as tokens, the time of a latency model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from shared.blocks import Geometry, Tokens
from shared.engines.base import Draw, Drawn, PoolMap, Work
from shared.engines.calibrate import quick_calibrate
from shared.engines.private_pool import anonymous_pool
from shared.engines.registry import EngineOptions, load_engine
from shared.engines.simulated import SimulatedEngine, Simulation
from shared.engines.simulated_kv import SimulatedPool, states
from shared.engines.tiny import Family
from shared.errors import ConfigError, InvalidInput, NamespaceMismatch
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Sampling

B = 16
SLOTS = 64
WHOLE = range(SLOTS)


@pytest.fixture(scope="session")
def folder(tiny: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and tokenizer of a model, without its weights."""
    bare = tmp_path_factory.mktemp("bare") / "model"
    bare.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source := tiny("llama") / name).is_file():
            (bare / name).write_bytes(source.read_bytes())
    return bare


@pytest.fixture
def engine(folder: Path) -> Iterator[SimulatedEngine]:
    with bound(folder, Simulation()) as engine:
        yield engine


@contextmanager
def bound(folder: Path, simulation: Simulation) -> Iterator[SimulatedEngine]:
    engine = SimulatedEngine(folder, simulation, block_size=B)
    with anonymous_pool(engine.namespace.geometry, SLOTS) as pool:
        engine.bind(pool)
        yield engine
        engine.unbind()


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 100, "seed": 1, "temperature": 0.0, **options})


def prompt(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 200, count).astype(np.uint32)


def draw(tokens: Tokens, position: int = 0, choice: int = 0, **options: Any) -> Draw:
    split = len(tokens) - position
    return Draw(sampling(**options), position, choice, tokens[:split], tokens[split:])


def one(engine: SimulatedEngine, work: Work) -> Drawn:
    (drawn,) = engine.step([work])
    assert drawn is not None
    return drawn


def answer(engine: SimulatedEngine, tokens: Tokens, count: int, slots: Sequence[int], **options: Any) -> list[int]:
    """Prefill whole, then decode step by step."""
    known = tokens
    out = [one(engine, Work(known, 0, slots, draw(known, **options))).token]
    while len(out) < count:
        known = np.append(known, np.uint32(out[-1]))
        work = Work(known[-1:], len(known) - 1, slots, draw(known, len(out), **options))
        out.append(one(engine, work).token)
    return out


def test_it_is_loaded_by_name_without_weights_or_torch(folder: Path) -> None:
    code = "import sys\nfrom shared.engines.registry import *\n"
    code += f"e = load_engine(EngineOptions(engine='simulated', model={str(folder)!r}))\n"
    code += "print(e.context_length, [n for n in ('torch', 'transformers') if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "4096 []"


def test_settings_choose_it(folder: Path) -> None:
    flags: dict[str, Any] = {
        "engine": "simulated",
        "model": str(folder),
        "context_length": 262_144,
        "simulated_layers": 0,
    }
    for settings in (PrefillSettings(**flags), DecodeSettings(**flags)):
        engine = load_engine(settings)
        assert engine.context_length == 262_144
        assert engine.namespace.layers > 1
    with pytest.raises(ConfigError) as refused:
        load_engine(EngineOptions(model=str(folder), context_length=5))
    assert refused.value.field == "context_length"


def test_namespace_is_its_own_and_names_the_models_tokenizer(folder: Path, tiny: Callable[[Family], Path]) -> None:
    model = load_engine(EngineOptions(model=str(tiny("llama")), block_size=B))
    same_shape = SimulatedEngine(folder, Simulation(layers=0, kv_heads=0, head_dim=0), block_size=B).namespace
    assert same_shape.geometry == model.namespace.geometry
    assert same_shape.tokenizer == model.namespace.tokenizer
    assert same_shape.difference(model.namespace) == "weights"


def test_wrong_geometry_pool_or_work_is_refused(engine: SimulatedEngine, folder: Path) -> None:
    with pytest.raises(ConfigError) as odd:
        SimulatedEngine(folder, Simulation(head_dim=1), dtype="bf16")
    assert odd.value.field == "simulated_head_dim"
    other = Geometry(2, B, 1, 2, "float32")
    with anonymous_pool(other, 2) as pool, pytest.raises(NamespaceMismatch) as mismatch:
        engine.bind(pool)
    assert mismatch.value.field == "layers"
    for work in (Work(prompt(0), 0, [0]), Work(prompt(B + 1), 0, [0]), Work(prompt(1), 4096, range(300))):
        with pytest.raises(InvalidInput):
            engine.step([work])
    with pytest.raises(InvalidInput):
        engine.step([Work(np.array([1 << 20], np.uint32), 0, [0])])
    engine.unbind()
    with pytest.raises(ConfigError):
        engine.step([Work(prompt(1), 0, [0])])


@given(cuts=st.lists(st.integers(1, 99), max_size=4, unique=True))
def test_chunks_write_the_bytes_and_draw_the_token_of_the_whole(deep: SimulatedEngine, cuts: list[int]) -> None:
    tokens, slots = prompt(100), [5, 3, 9, 1, 0, 2, 8]
    expected = one(deep, Work(tokens, 0, WHOLE, draw(tokens)))
    edges = [0, *sorted(cuts), 100]
    for low, high in pairwise(edges[:-1]):
        assert deep.step([Work(tokens[low:high], low, slots)]) == [None]
    assert one(deep, Work(tokens[edges[-2] :], edges[-2], slots, draw(tokens))) == expected
    assert deep.mismatches == 0


@pytest.fixture(scope="module")
def deep(folder: Path) -> Iterator[SimulatedEngine]:
    with bound(folder, Simulation(layers=3)) as engine:
        yield engine


def test_answers_depend_on_prompt_seed_and_choice_only(engine: SimulatedEngine, folder: Path) -> None:
    first = answer(engine, prompt(40), 30, WHOLE)
    assert answer(engine, prompt(40), 30, WHOLE[::-1]) == first
    assert answer(engine, prompt(40), 30, WHOLE, seed=9) == first  # greedy
    assert answer(engine, prompt(40, seed=1), 30, WHOLE) != first
    hot = answer(engine, prompt(40), 30, WHOLE, temperature=1.0)
    assert hot == answer(engine, prompt(40), 30, WHOLE, temperature=1.0)
    assert hot != answer(engine, prompt(40), 30, WHOLE, temperature=1.0, seed=2)
    tokens = prompt(40)
    choices = [one(engine, Work(tokens, 0, WHOLE, draw(tokens, choice=c))).token for c in range(8)]
    assert len(set(choices)) > 4


def test_tokens_are_words_and_never_end_the_answer(engine: SimulatedEngine, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = answer(engine, prompt(20), 500, WHOLE)
    assert not engine.eos_ids & set(tokens)
    text = tokenizer.decode(tokens)
    assert text.isascii() and text.replace(" ", "").isalpha()
    assert engine.mismatches == 0


def test_a_bias_forces_a_token_even_the_last(engine: SimulatedEngine) -> None:
    (eos, *_) = engine.eos_ids
    work = Work(prompt(20), 0, WHOLE, draw(prompt(20), logit_bias={eos: 100.0, 70: -100.0}, stop_ids=[eos]))
    assert one(engine, work).token == eos
    later = draw(prompt(20), logit_bias={eos: 100.0}, stop_ids=[eos], min_tokens=3)
    assert one(engine, Work(prompt(20), 0, WHOLE, later)).token != eos


def test_logprobs_are_plausible(engine: SimulatedEngine) -> None:
    drawn = one(engine, Work(prompt(20), 0, WHOLE, draw(prompt(20), logprobs=5)))
    assert drawn.top[0].token == drawn.token and drawn.top[0].logprob == drawn.logprob < 0
    assert len({entry.token for entry in drawn.top}) == 5
    values = [entry.logprob for entry in drawn.top]
    assert values == sorted(values, reverse=True)
    assert sum(np.exp(values)) < 1
    assert not one(engine, Work(prompt(20), 0, WHOLE, draw(prompt(20), logprobs=0))).top


@pytest.mark.parametrize("layers", [1, 4])
def test_wrong_bytes_are_noticed(folder: Path, layers: int) -> None:
    engine = SimulatedEngine(folder, Simulation(layers=layers, head_dim=4), block_size=B)
    geometry = engine.namespace.geometry
    with anonymous_pool(geometry, 8) as pool:
        engine.bind(pool)
        tokens = prompt(5 * B)
        for swap in range(layers):
            engine.step([Work(tokens, 0, range(8))])
            memory = words(pool)
            memory[1], memory[2] = memory[2].copy(), memory[1].copy()
            before = engine.mismatches
            known = np.append(tokens, np.uint32(7))
            engine.step([Work(known[-1:], len(tokens), range(8), draw(known, 1))])
            assert engine.mismatches > before, swap


def test_a_running_answer_is_checked_too(engine: SimulatedEngine) -> None:
    known = prompt(4 * B)
    engine.step([Work(known, 0, WHOLE)])
    pool = engine._pool
    assert pool is not None
    pool.write(0, np.array([2]), np.array([5]), states(np.uint64(1), prompt(1), 0))
    for position in range(1, 6 * B):
        known = np.append(known, np.uint32(position))
        engine.step([Work(known[-1:], len(known) - 1, WHOLE, draw(known, position + 1))])
    assert engine.mismatches >= 2


def words(pool: PoolMap) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return SimulatedPool(pool, pool.geometry)._words


def test_it_takes_the_time_of_its_models(folder: Path) -> None:
    simulation = Simulation(PrefillModel(0.02, 1e-4, 1e-6), DecodeModel(0.03, 0.001, 1e-5), layers=4)
    engine = SimulatedEngine(folder, simulation, block_size=B)
    tokens = prompt(200)
    whole = engine.seconds([Work(tokens, 0, WHOLE, draw(tokens))])
    halves = [Work(tokens[:90], 0, WHOLE), Work(tokens[90:], 90, WHOLE, draw(tokens))]
    assert whole == pytest.approx(0.02 + 200e-4 + 200**2 * 1e-6)
    assert sum(engine.seconds([half]) for half in halves) == pytest.approx(whole)
    running = Work(tokens[:1], 99, WHOLE, draw(prompt(100), 3))
    assert engine.seconds([running] * 3) == pytest.approx(0.03 + 0.003 + 300e-5)
    assert engine.latency == (simulation.prefill, simulation.decode)


def test_it_sleeps_without_computing_and_calls_the_hook_for_each_layer(folder: Path) -> None:
    tokens, seen = prompt(64), list[tuple[int, float]]()
    with bound(folder, Simulation(PrefillModel(0.2, 0, 0), layers=4)) as engine:
        began, cpu = time.perf_counter(), time.thread_time()
        engine.step([Work(tokens, 0, WHOLE, draw(tokens))], lambda n: seen.append((n, time.perf_counter() - began)))
    assert [layer for layer, _ in seen] == [0, 1, 2, 3]
    assert all(after >= 0.05 * (layer + 1) - 0.001 for layer, after in seen)
    assert time.thread_time() - cpu < 0.1


def test_calibration_runs_over_it(folder: Path) -> None:
    engine = SimulatedEngine(folder, Simulation(PrefillModel(0.002, 2e-5, 0), DecodeModel(0.004, 0.001, 0)))
    prefill, decode = quick_calibrate(engine, budget_s=0.0)
    assert prefill.seconds(1000, 0) > prefill.seconds(10, 0) > 0
    assert decode.seconds(8, 512) > 0


def test_nothing_is_free_even_where_nothing_is_simulated(engine: SimulatedEngine) -> None:
    prefill, decode = engine.latency
    assert prefill.seconds(2000, 0) > prefill.seconds(1000, 0) > 0
    assert decode.seconds(2, 10) > decode.seconds(1, 5) > 0


def test_a_tokenizer_without_words_is_refused(folder: Path, tmp_path: Path) -> None:
    for source in folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["!", -1.0], ["<0x0A>", -2.0]]}}))
    with pytest.raises(ConfigError) as refused:
        SimulatedEngine(tmp_path)
    assert refused.value.field == "model"
