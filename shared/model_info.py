"""What a model folder says of itself, read from its JSON files only (no torch, no transformers)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

GROWING_ROPE = ("longrope", "su")  # frequencies change with the length of the sequence: KV would depend on what follows


@dataclass(frozen=True)
class ModelInfo:
    """Geometry and limits of a decoder-only model. ``context_length`` in tokens, prompt and output together."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    model_type: str


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, {} when there is no such file. Raises ConfigError when it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}", field="model") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", field="model")
    return value


def model_info(folder: Path) -> ModelInfo:
    """Raises ConfigError, saying what is missing or unsupported."""
    config = read_json(folder / "config.json")
    if not config:
        raise ConfigError(f"{folder} is no model folder: it has no config.json", field="model")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{folder} is an encoder-decoder model; decoder-only models are supported", field="model")
    heads = _number(config, "num_attention_heads", "n_head")
    hidden = _number(config, "hidden_size", "n_embd")
    return ModelInfo(
        layers=_number(config, "num_hidden_layers", "n_layer"),
        kv_heads=_number(config, "num_key_value_heads", default=heads),
        head_dim=_number(config, "head_dim", default=hidden // heads),
        vocab_size=_number(config, "vocab_size"),
        context_length=_context_length(config),
        eos_ids=_eos_ids(config, read_json(folder / "generation_config.json")),
        model_type=str(config.get("model_type", "")),
    )


def _number(config: dict[str, Any], *names: str, default: int = 0) -> int:
    """The first of ``names`` that is set. Raises ConfigError when none is and there is no default."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"config.json sets no usable {names[0]}: decoder-only models with attention are supported", field="model"
        )
    return value


def _context_length(config: dict[str, Any]) -> int:
    longest = _number(config, "max_position_embeddings", "n_positions")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in GROWING_ROPE:
        return longest
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return min(longest, int(original)) if original else longest


def _eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    """The generation settings decide where they say anything; chat models often end turns with more than one token."""
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
