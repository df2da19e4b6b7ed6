"""Loading by name, calibrating at start, and the tiny model that tests are made of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shared.engines.base import Draw, Work
from shared.engines.calibrate import quick_calibrate
from shared.engines.private_pool import anonymous_pool
from shared.engines.registry import EngineOptions, load_engine
from shared.engines.tiny import Family, make_tiny_model
from shared.engines.transformers import TransformersEngine
from shared.errors import ConfigError
from shared.fingerprint import model_namespace
from shared.messages import Sampling


def test_engine_is_loaded_by_name_with_the_users_words(tiny: Callable[[Family], Path]) -> None:
    engine = load_engine(EngineOptions(model=str(tiny("llama")), dtype="bf16", block_size=64))
    assert engine.namespace == model_namespace(tiny("llama"), dtype="bfloat16", block_size=64)
    assert engine.context_length == 4096
    assert len(engine.eos_ids) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("engine", "abacus"), ("dtype", "int7"), ("model", "/nowhere"), ("device", "abacus"), ("device", "cuda:99")],
)
def test_wrong_choice_is_refused_by_field(tiny: Callable[[Family], Path], field: str, value: str) -> None:
    options: dict[str, Any] = {"model": str(tiny("llama")), field: value}
    with pytest.raises(ConfigError) as refused:
        load_engine(EngineOptions(**options))
    assert refused.value.field == field


def test_registry_imports_no_torch() -> None:
    code = "import sys, shared.engines.registry, shared.model, shared.fingerprint, shared.latency\n"
    code += "import shared.engines.sampling, shared.engines.local, shared.engines.tiny, shared.model_fetch\n"
    code += "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_calibration_predicts_and_binds_the_pool_again(llama: TransformersEngine) -> None:
    with anonymous_pool(llama.namespace.geometry, 4) as pool:
        prefill, decode = quick_calibrate(llama, pool, budget_s=0.5)
        assert llama.step([Work(np.arange(5, dtype=np.uint32), 0, [0])]) == [None]
    for model in (prefill, decode):
        assert model.seconds(1000, 0) > 0
    assert prefill.seconds(2000, 0) > prefill.seconds(2000, 1900) > 0
    quick_calibrate(llama, budget_s=0.0)
    with pytest.raises(ConfigError):
        llama.step([Work(np.arange(5, dtype=np.uint32), 0, [0])])


def test_calibration_of_a_short_context(tmp_path: Path) -> None:
    import transformers as t

    config = t.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=4, max_position_embeddings=64)  # fmt: skip
    t.LlamaForCausalLM(config).save_pretrained(tmp_path)
    prefill, decode = quick_calibrate(TransformersEngine(tmp_path, block_size=16))
    assert prefill.seconds(60, 0) > 0 and decode.seconds(1, 60) > 0


def parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "np") as file:
        return sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118


def test_tiny_model_is_small_and_the_same_every_time(tmp_path: Path) -> None:
    first, again = (
        make_tiny_model(tmp_path / "a", vocabulary="small"),
        make_tiny_model(tmp_path / "b", vocabulary="small"),
    )
    other = make_tiny_model(tmp_path / "c", seed=1, vocabulary="small")
    assert parameters(first) <= 2_000_000
    assert model_namespace(first) == model_namespace(again)
    assert model_namespace(first).difference(model_namespace(other)) == "weights"


def test_tiny_tokenizer_speaks_any_text_and_has_a_chat_template(tiny: Callable[[Family], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    text = "Wer lernt, faßt Mut — 你好 👋🏽"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.model
def test_tiny_model_with_the_real_vocabulary(tmp_path: Path) -> None:
    from shared.model import resolve_model

    resolve_model()
    folder = make_tiny_model(tmp_path, vocabulary="real")
    engine = TransformersEngine(folder)
    assert engine.info.vocab_size == 49152
    assert parameters(folder) <= 2_000_000
    texts = set()
    with anonymous_pool(engine.namespace.geometry, 8) as pool:
        engine.bind(pool)
        for seed in range(8):
            prompt = np.random.default_rng(seed).integers(3, 49152, 40).astype(np.uint32)
            [drawn] = engine.step([Work(prompt, 0, range(8), Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0))])
            assert drawn is not None
            texts.add(drawn.token)
    assert len(texts) > 5


@pytest.mark.model
def test_real_model_answers() -> None:
    from transformers import AutoTokenizer

    from shared.engines.local import LocalRunner
    from shared.model import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model())
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    engine = load_engine(EngineOptions())
    assert engine.namespace.geometry.slot_bytes == 32 * 46_080
    with LocalRunner(engine, slots=8) as runner:
        sampling = Sampling(max_tokens=24, seed=0, temperature=0.0, stop_ids=sorted(engine.eos_ids))
        outputs = runner.generate(prompt, sampling)
    assert "Paris" in tokenizer.decode([output.token for output in outputs])
    assert outputs[-1].finish == "stop"
