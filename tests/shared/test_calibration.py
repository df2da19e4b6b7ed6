"""``mooncake calibrate``'s measuring: models recovered, points bounded, files that say what they are of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.calibration import Calibration, Subject, latency_models, read_calibration, write_calibration
from shared.engines.calibration import FEW, MOST_KV, decode_points, measure, prefill_points
from shared.engines.registry import EngineOptions, subject
from shared.engines.simulated import SimulatedEngine, Simulation
from shared.errors import ConfigError
from shared.flops import Flops, model_flops, reuse_pays_above, shortest_paying_prefix
from shared.instance.settings import InstanceSettings
from shared.latency import DecodeModel, DecodeSample, PrefillModel, PrefillSample, fit_decode, fit_prefill
from tests.bare_model import bare_model

PREFILL, DECODE = PrefillModel(0.001, 2e-6, 1e-9), DecodeModel(0.001, 1e-4, 1e-7)
SUBJECT = Subject(engine="transformers", model="m", weights="w", dtype="float32", threads=1, device="cpu")
KEPT = Calibration(
    subject=SUBJECT,
    prefill=PREFILL,
    decode=DECODE,
    kv_bytes=1024,
    chunk=256,
    prefill_r2=0.99,
    decode_r2=0.98,
    prefill_samples=[PrefillSample(64, 0, 0.002), PrefillSample(512, 256, 0.004)],
    decode_samples=[DecodeSample(1, 64, 0.002), DecodeSample(8, 512, 0.004)],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_model(tmp_path_factory.mktemp("calibration"))


@given(st.integers(2, 200_000), st.sampled_from([16, 32, 512]), st.integers(1, 64))
def test_points_stay_within_bounds_and_begin_cheaply(longest: int, block: int, most_batch: int) -> None:
    prompts, steps = prefill_points(longest, block), decode_points(longest, most_batch)
    assert all(0 <= p < n <= longest and (p % block == 0 or p == n - 1) for n, p in prompts)
    assert max(prompts).n == longest and len(set(prompts)) == len(prompts)
    assert all(batch <= most_batch and context <= longest and batch * context <= MOST_KV for batch, context in steps)
    assert prompts[0].n - prompts[0].p <= 64 and steps[0].batch == 1 and len(set(steps)) == len(steps)


class Counted:
    """A simulated engine's models in place of the clock: each step takes what they say, whatever the machine does."""

    def __init__(self, engine: SimulatedEngine, simulation: Simulation) -> None:
        self.now, step = 0.0, engine.step
        slow = SimulatedEngine.__new__(SimulatedEngine)
        slow.simulation = simulation

        def counted(batch, on_layer=None):  # type: ignore[no-untyped-def]
            self.now += slow.seconds(batch)
            return step(batch, on_layer)

        engine.step = counted  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now


def test_models_are_recovered_in_chunks(folder: Path) -> None:
    engine, told = SimulatedEngine(folder), list[str]()
    engine.context_length = 5000
    clock = Counted(engine, Simulation(PREFILL, DECODE))
    found = measure(engine, 256, 4096, 8, 0.4, clock, lambda what, share: told.append(what))
    prefill, decode = fit_prefill(found.prefill_samples()), fit_decode(found.decode_samples())
    assert prefill.seconds(100_000, 0) == pytest.approx(PREFILL.seconds(100_000, 0), rel=1e-3)
    assert decode.seconds(64, 64_000) == pytest.approx(DECODE.seconds(64, 64_000), rel=1e-3)
    assert "prompt of 64 tokens, 0 cached" in told and "1 sequences of 64 tokens" in told


def test_what_is_too_dear_is_left_out_but_for_the_first_few(folder: Path) -> None:
    found = measure(
        SimulatedEngine(folder, Simulation(PrefillModel(0.01, 0, 0), DecodeModel(0.01, 0, 0))), 256, 64, 4, 0
    )
    assert 1 <= len(found.prefill) <= FEW and 1 <= len(found.decode) <= FEW


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, KEPT)
    assert read_calibration(path) == KEPT
    assert latency_models(str(path), SUBJECT) == (PREFILL, DECODE)


@pytest.mark.parametrize(("name", "value"), [("threads", 2), ("weights", "other"), ("dtype", "bfloat16")])
def test_models_of_another_engine_are_refused(tmp_path: Path, name: str, value: object) -> None:
    import msgspec

    write_calibration(tmp_path / "c.json", KEPT)
    with pytest.raises(ConfigError, match=f"measured with {name}: .*, not {value}") as refused:
        latency_models(str(tmp_path / "c.json"), msgspec.structs.replace(SUBJECT, **{name: value}))
    assert refused.value.field == "latency_model"
    latency_models(str(tmp_path / "c.json"), msgspec.structs.replace(SUBJECT, model="served under another name"))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(ConfigError, match="No such file"):
        read_calibration(path)
    path.write_text(json.dumps({"subject": {}}))
    with pytest.raises(ConfigError, match="no file of `mooncake calibrate`"):
        read_calibration(path)


def test_the_simulated_engine_takes_the_time_of_the_file(tmp_path: Path, folder: Path) -> None:
    write_calibration(tmp_path / "c.json", KEPT)
    usual, told = InstanceSettings(), InstanceSettings(latency_model=str(tmp_path / "c.json"))
    assert told.simulation.prefill == PREFILL and told.simulation.decode == DECODE
    assert usual.simulation.prefill.base == usual.simulated_prefill_base_s
    named = subject(SimulatedEngine(folder, name="tiny"), EngineOptions("simulated"))
    assert (named.engine, named.model, named.threads) == ("simulated", "tiny", 1)


# -- does reuse pay? ---------------------------------------------------------------------------------------------------

GB = 1e9


def test_equation_two_has_the_paper_s_answers() -> None:
    """LLaMA3-70B, 8,192 tokens of prefix, at the peak of 8 A800 and of 8 H800. The paper rounds."""
    layers, width, a, b = 80, 8192, 4, 22
    for peak, rate in ((8 * 312e12, 5.86), (8 * 989e12, 18.57)):
        model = PrefillModel(0.0, layers * b * width**2 / peak, layers * a * width / peak)
        assert reuse_pays_above(model, 8192, 327_680) / GB == pytest.approx(rate, abs=0.005)


@given(st.floats(1e-7, 1e-2), st.floats(0, 1e-7), st.integers(16, 10**6), st.floats(1e6, 1e12))
def test_the_shortest_paying_prefix_is_where_it_begins_to_pay(a: float, b: float, kv: int, rate: float) -> None:
    model = PrefillModel(0.1, a, b)
    found = shortest_paying_prefix(model, kv, rate, 1 << 20)
    if found is None:
        assert reuse_pays_above(model, 1 << 20, kv) > rate
        return
    assert reuse_pays_above(model, found, kv) <= rate
    assert found == 1 or reuse_pays_above(model, found - 1, kv) > rate


def test_reuse_never_pays_where_computing_is_free() -> None:
    assert reuse_pays_above(PrefillModel(1.0, 0.0, 0.0), 100, 16) == float("inf")
    assert shortest_paying_prefix(PrefillModel(1.0, 0.0, 0.0), 16, 1e12, 1000) is None


LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def test_operations_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    flops = model_flops(tmp_path)
    assert flops.token == pytest.approx(2 * 68.4e9, rel=0.01), "LLaMA3-70B without embeddings and head"
    assert flops.prefill(1, 0) == flops.token + flops.pair + flops.head
    assert flops.prefill(9, 4) == 5 * flops.token + (5 + 6 + 7 + 8 + 9) * flops.pair + flops.head
    assert Flops(1, 2, 3).decode(4, 50) == 4 * 4 + 100


@pytest.mark.parametrize("change", [{"num_experts": 8}, {"hidden_size": None, "head_dim": 128}])
def test_a_model_whose_operations_cannot_be_told_says_so(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(ConfigError):
        model_flops(tmp_path)
