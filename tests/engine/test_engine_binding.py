"""What the engine refuses: pools that are not its own, work that is wrong, models that it would compute wrongly."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.blocks import Tokens
from shared.engines.base import Draw, PoolMap, Work
from shared.engines.pool import KVPool
from shared.engines.private_pool import anonymous_pool
from shared.engines.tiny import make_tiny_model
from shared.engines.transformers import TransformersEngine
from shared.errors import ConfigError, InvalidInput, NamespaceMismatch
from shared.messages import Sampling

B = 16
GREEDY = Sampling(max_tokens=4, seed=0, temperature=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 5), ("block_size", 32), ("kv_heads", 1), ("head_dim", 8), ("dtype", "bfloat16")],
)
def test_pool_of_another_geometry_is_refused_by_field(llama: TransformersEngine, field: str, value: object) -> None:
    geometry = dataclasses.replace(llama.namespace.geometry, **{field: value})  # type: ignore[arg-type]
    with anonymous_pool(geometry, 2) as pool, pytest.raises(NamespaceMismatch) as refused:
        llama.bind(pool)
    assert refused.value.field == field


def test_pool_that_is_shorter_than_it_says_is_refused_and_not_enlarged(
    llama: TransformersEngine, tmp_path: Path
) -> None:
    geometry = llama.namespace.geometry
    file = tmp_path / "pool"
    file.write_bytes(bytes(geometry.slot_bytes * 2 - 1))
    with pytest.raises(ConfigError):
        llama.bind(PoolMap(str(file), 0, geometry.slot_bytes, 2, geometry))
    assert file.stat().st_size == geometry.slot_bytes * 2 - 1


@pytest.mark.parametrize(("offset", "extra"), [(2, 0), (0, 2), (0, -4)])
def test_pool_with_misplaced_slots_is_refused(llama: TransformersEngine, offset: int, extra: int) -> None:
    geometry = llama.namespace.geometry
    with anonymous_pool(geometry, 4) as pool, pytest.raises(ConfigError):
        llama.bind(dataclasses.replace(pool, offset=offset, stride=geometry.slot_bytes + extra, slots=2))


def test_rebinding_leaves_the_old_pool_alone(llama: TransformersEngine) -> None:
    tokens = np.arange(3, 3 + B, dtype=np.uint32)
    geometry = llama.namespace.geometry
    with anonymous_pool(geometry, 1) as old, anonymous_pool(geometry, 1) as new:
        before, after = KVPool.mapped(old), KVPool.mapped(new)
        llama.bind(old)
        llama.step([Work(tokens, 0, [0])])
        kept = before.gather(0, torch.tensor([0])).clone()
        llama.bind(new)
        llama.step([Work(tokens + 100, 0, [0])])
        assert torch.equal(before.gather(0, torch.tensor([0])), kept)
        assert not torch.equal(after.gather(0, torch.tensor([0])), kept)


def test_mapping_outlives_the_descriptor_and_ends_with_unbind(llama: TransformersEngine) -> None:
    with anonymous_pool(llama.namespace.geometry, 2) as pool:
        llama.bind(pool)
        inode = f" {os.stat(pool.path).st_ino} "  # other pools of this process have the same name
    llama.step([Work(np.arange(5, dtype=np.uint32), 0, [0])])
    assert inode in Path("/proc/self/maps").read_text()
    llama.unbind()
    assert inode not in Path("/proc/self/maps").read_text()
    with pytest.raises(ConfigError):
        llama.step([Work(np.arange(5, dtype=np.uint32), 0, [0])])


def work(tokens: Tokens | list[int], start: int = 0, slots: int = 4) -> Work:
    return Work(np.array(tokens, dtype=np.uint32), start, range(slots), Draw(GREEDY, 0))


@pytest.mark.parametrize(
    "wrong",
    [work([]), work([1], start=-1), work([1] * (B + 1), slots=1), work([1], start=4096, slots=300), work([512])],
    ids=["empty", "negative", "slots", "context", "vocabulary"],
)
def test_wrong_work_is_refused_and_harms_nothing(llama: TransformersEngine, wrong: Work) -> None:
    with anonymous_pool(llama.namespace.geometry, 300) as pool:
        llama.bind(pool)
        right = work([5, 6, 7])
        expected = llama.step([right])
        with pytest.raises(InvalidInput):
            llama.step([right, wrong])
        assert llama.step([right]) == expected
        assert llama.step([]) == []


def save(folder: Path, config: object) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_other_standard_families_run(tmp_path: Path) -> None:
    """Loading checks the logits against the model's own attention; nothing here is specific to one family."""
    import transformers as t

    for number, config in enumerate(
        [
            t.Qwen3Config(**SMALL, head_dim=8),
            t.Phi3Config(**SMALL),
            t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128),
            t.GraniteConfig(**SMALL, logits_scaling=4.0, attention_multiplier=0.1),
        ]
    ):
        engine = TransformersEngine(save(tmp_path / str(number), config), block_size=B)
        assert engine.layers == 2


REASONS = {
    "softcap": "softcap",
    "mla": "MLA",
    "ssm": "num_attention_heads",
    "encoder-decoder": "encoder-decoder",
    "chunked": "chunked_attention",
}


@pytest.mark.parametrize("kind", REASONS)
def test_model_without_standard_kv_is_refused_with_a_reason(tmp_path: Path, kind: str) -> None:
    import transformers as t

    configs: dict[str, Callable[[], object]] = {
        "softcap": lambda: t.Gemma2Config(**SMALL, head_dim=8),
        "mla": lambda: t.DeepseekV2Config(
            **{**SMALL, "num_key_value_heads": 4},
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
            n_routed_experts=2,
        ),
        "ssm": lambda: t.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
        "chunked": lambda: t.Llama4TextConfig(**SMALL, intermediate_size_mlp=32, attention_chunk_size=32, head_dim=8),
    }
    folder = tmp_path / "model"
    if kind == "encoder-decoder":
        t.T5Config(d_model=32, num_layers=1).save_pretrained(folder)
    else:
        save(folder, configs[kind]())
    with pytest.raises(ConfigError) as refused:
        TransformersEngine(folder, block_size=B)
    assert refused.value.field == "model"
    assert REASONS[kind] in refused.value.message


def test_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", vocabulary="small", layers=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError):
        TransformersEngine(folder, block_size=B)
    weights.unlink()
    with pytest.raises(ConfigError):
        TransformersEngine(folder, block_size=B)


def test_longrope_context_ends_where_the_frequencies_would_change(tmp_path: Path) -> None:
    import transformers as t

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = t.Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=32)
    assert TransformersEngine(save(tmp_path / "model", config), block_size=B).context_length == 32
