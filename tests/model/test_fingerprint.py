"""Namespaces of model folders: the same tokens under another model, revision, dtype, LoRA or salt share nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.blocks import Namespace, chain_keys, split_keys
from shared.engines.tiny import make_tiny_model
from shared.errors import ConfigError
from shared.fingerprint import PAGE, canonical_dtype, model_namespace, weights_fingerprint

TOKENS = np.arange(2048, dtype=np.uint32)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def shared_blocks(one: Namespace, other: Namespace) -> int:
    keys = [split_keys(chain_keys(space.root(), TOKENS, space.block_size)) for space in (one, other)]
    return len(set(keys[0]) & set(keys[1]))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_config(folder: Path) -> None:
    edit(folder / "config.json", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})


def of_window(folder: Path) -> None:
    edit(folder / "config.json", sliding_window=64)


def of_quantization(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def of_last_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    flip(file, file.stat().st_size - 1)


def of_first_weight(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    flip(folder / "model.safetensors", 8 + int.from_bytes(data[:8], "little"))


def of_revision(folder: Path) -> None:
    make_tiny_model(folder, seed=1, vocabulary="small", layers=1)


def of_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|end|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (of_config, "model"),
        (of_window, "model"),
        (of_quantization, "model"),
        (of_first_weight, "weights"),
        (of_last_weight, "weights"),
        (of_revision, "weights"),
        (of_tokenizer, "tokenizer"),
    ],
)
def test_another_model_shares_nothing(folder: Path, tiny: Path, change: Callable[[Path], None], field: str) -> None:
    change(folder)
    assert model_namespace(tiny).difference(model_namespace(folder)) == field
    assert shared_blocks(model_namespace(tiny), model_namespace(folder)) == 0


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"block_size": 64}, {"lora": "ab"}, {"salt": "tenant"}, {"layout": "opaque"}]
)
def test_another_deployment_shares_nothing(tiny: Path, changes: dict[str, object]) -> None:
    base = model_namespace(tiny)
    other = msgspec.structs.replace(base, **changes)
    assert shared_blocks(base, other) == 0
    assert base.proof() != other.proof()


def test_the_same_model_elsewhere_shares_everything(folder: Path, tiny: Path) -> None:
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    edit(folder / "config.json", transformers_version="4.0", _name_or_path="/elsewhere", use_cache=False)
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    (folder / "README.md").write_text("about it")
    assert model_namespace(folder) == model_namespace(tiny)
    assert shared_blocks(model_namespace(folder), model_namespace(tiny)) == len(TOKENS) // 32


def test_processes_agree_whatever_their_hash_seed(tiny: Path) -> None:
    code = "import sys; from shared.fingerprint import model_namespace as f\n"
    code += "n = f(sys.argv[1]); print(n.proof().hex(), 'torch' in sys.modules)"
    said = {
        subprocess.check_output(
            [sys.executable, "-c", code, str(tiny)], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        ).strip()
        for seed in ("0", "12345")
    }
    assert said == {f"{model_namespace(tiny).proof().hex()} False"}


def test_dtype_names_mean_the_same_namespace(tiny: Path) -> None:
    assert model_namespace(tiny, dtype="bf16") == model_namespace(tiny, dtype="bfloat16")
    assert model_namespace(tiny, dtype="bf16").geometry.slot_bytes * 2 == model_namespace(tiny).geometry.slot_bytes
    with pytest.raises(ConfigError):
        canonical_dtype("int4")


def test_weights_of_other_formats_are_sampled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    weights.write_bytes(os.urandom(PAGE * 600))
    before = model_namespace(folder)
    flip(weights, PAGE * 600 - 1)
    assert before.difference(model_namespace(folder)) == "weights"
    with weights.open("ab") as file:
        file.write(b"x")
    assert before.difference(model_namespace(folder)) == "weights"


def test_folder_without_weights_or_with_truncated_ones_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="truncated"):
        model_namespace(folder)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="truncated"):
        model_namespace(folder)
    file.unlink()
    with pytest.raises(ConfigError, match="no weights"):
        model_namespace(folder)


def test_weights_that_may_not_be_read_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is another than the owner. (Root may read everything, so the file says no.)"""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: Permission denied"):
        weights_fingerprint(folder)
