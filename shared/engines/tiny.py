"""A seeded random model of at most 2 M parameters in a Hugging Face folder: for tests, and for trying the mesh out.

Its text is noise, but varied noise: the weights are drawn wide, so that a wrong key or value changes the output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from shared.errors import ConfigError

Family = Literal["llama", "qwen2", "mistral"]
Vocabulary = Literal["auto", "real", "small"]

CONTEXT = 4096
WINDOW = 48  # of the mistral variant: more than one block, less than a test's prompt
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "A prompt's cache depends on nothing after it, so a prefix that was computed once can be loaded by every later "
    "request that shares it. The quick brown fox jumps over the lazy dog. What is the capital of France? Paris."
)


def make_tiny_model(
    path: str | Path, seed: int = 0, family: Family = "llama", *, vocabulary: Vocabulary = "auto", layers: int = 4
) -> Path:
    """Write the model and its tokenizer into the folder ``path`` and return it. The same arguments give the same
    bytes. ``vocabulary``: that of the default model where it is in the cache, else a small byte-level one."""
    from transformers.utils import logging

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    _write_tokenizer(folder, vocabulary)
    _write_model(folder, seed, family, layers)
    return folder


def _write_model(folder: Path, seed: int, family: Family, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(family, layers, *_vocabulary(folder)))
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)


def _config(family: Family, layers: int, size: int, end: int) -> Any:
    from transformers import LlamaConfig, MistralConfig, Qwen2Config

    common: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    if family == "llama":
        return LlamaConfig(**common, head_dim=16)
    if family == "mistral":
        return MistralConfig(**common, head_dim=16, sliding_window=WINDOW)
    return Qwen2Config(**common)


def _vocabulary(folder: Path) -> tuple[int, int]:
    """Size, and the id that ends a turn."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size(), tokenizer.get_vocab()[SPECIAL[2]]


def _write_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    from shared.model import default_folder

    real = default_folder()
    if vocabulary == "real" and real is None:
        raise ConfigError("the default model is not in the cache: `mooncake model fetch`", field="vocabulary")
    if vocabulary == "small" or real is None:
        return _write_small_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source := real / name).is_file():
            (folder / name).write_bytes(source.read_bytes())


def _write_small_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "unk_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
