"""A model folder without weights: configuration and words, all that the simulated engine reads. No torch."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 8192,
    "eos_token_id": 0,
}


def bare_model(folder: Path) -> Path:
    """Writes it into ``folder``, which may be new."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"Ġ" + chr(97 + i // 26 % 26) + chr(97 + i % 26): i for i in range(300)}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    return folder
