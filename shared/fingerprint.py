"""The namespace of a model folder: what two deployments must share to share KV blocks.

Weights are not read whole. Of every safetensors file the fingerprint covers the header (names, shapes, types and
offsets of all tensors), the size, and three pages of each tensor: its first, its middle and its last. Training
changes every tensor everywhere, so another revision of the same model differs in these; a change confined to other
pages of a tensor does not show. Other weight files are sampled at the same density by position.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.blocks import ITEMSIZE, Namespace
from shared.errors import ConfigError
from shared.model_info import model_info, read_json

PAGE = 4096
SAMPLES = 256  # pages of a weight file without a header that we can read
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
# written by the library or about the folder, without influence on what is computed
VOLATILE = frozenset(
    ["transformers_version", "_name_or_path", "name_or_path", "architectures", "use_cache", "dtype", "torch_dtype"]
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}


def canonical_dtype(name: str) -> str:
    """``bf16`` -> ``bfloat16``. Raises ConfigError for a type that blocks cannot have."""
    full = DTYPES.get(name, name)
    if full not in ITEMSIZE:
        raise ConfigError(f"dtype {name!r} is none of {', '.join(ITEMSIZE)}", field="dtype")
    return full


def model_namespace(folder: Path | str, *, dtype: str = "float32", block_size: int = 32) -> Namespace:
    """Deployment namespace of the model in ``folder``. The same for every process and machine with the same files."""
    path = Path(folder)
    info = model_info(path)
    return Namespace(
        model=config_fingerprint(path),
        weights=weights_fingerprint(path),
        tokenizer=tokenizer_fingerprint(path),
        dtype=canonical_dtype(dtype),
        layers=info.layers,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        block_size=block_size,
    )


def config_fingerprint(folder: Path) -> str:
    """All settings (RoPE, windows, quantization ...) but those that say nothing about the computation."""
    return _canonical(read_json(folder / "config.json"), VOLATILE).hex()


def tokenizer_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER:
        if (file := folder / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    # the template shapes prompts, not the meaning of token ids
    digest.update(_canonical(read_json(folder / "tokenizer_config.json"), VOLATILE | {"chat_template"}))
    return digest.hexdigest()[:32]


def weights_fingerprint(folder: Path) -> str:
    """Raises ConfigError when the folder holds no weights, or such that this user may not read."""
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS and file.is_file())
    safe = [file for file in files if file.suffix == ".safetensors"]
    if not files:
        raise ConfigError(f"{folder} holds no weights ({', '.join(WEIGHTS)})", field="model")
    digest = hashlib.sha256()
    for file in safe or files:
        try:
            digest.update(file.name.encode() + b"\0" + _file_digest(file))
        except OSError as e:
            raise ConfigError(f"{file} cannot be read: {e.strerror}", field="model") from e
    return digest.hexdigest()[:32]


def _canonical(settings: dict[str, Any], without: frozenset[str]) -> bytes:
    kept = {name: value for name, value in settings.items() if name not in without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).digest()[:16]


def _file_digest(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        header, pages = _safetensors(stream.fileno(), size) if file.suffix == ".safetensors" else (b"", _spread(size))
        digest.update(header)
        for at in pages:
            digest.update(os.pread(stream.fileno(), PAGE, at))
    return digest.digest()


def _safetensors(fd: int, size: int) -> tuple[bytes, Iterator[int]]:
    """The raw header, and where to sample: first, middle and last page of each tensor, in file order."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= size - 8:
        raise ConfigError("a weight file is truncated: its header does not fit", field="model")
    raw = os.pread(fd, length, 8)
    spans = sorted(entry["data_offsets"] for name, entry in json.loads(raw).items() if name != "__metadata__")
    if spans and 8 + length + spans[-1][1] > size:
        raise ConfigError("a weight file is truncated: tensors are missing", field="model")
    base = 8 + length
    return raw, (base + at for low, high in spans for at in _three(low, high))


def _three(low: int, high: int) -> list[int]:
    return sorted({low, low + (high - low) // 2, max(low, high - PAGE)})


def _spread(size: int) -> Iterator[int]:
    return iter(sorted({at * size // SAMPLES for at in range(SAMPLES)} | {max(0, size - PAGE)}))
