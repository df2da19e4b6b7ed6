"""From what a user calls a model to a folder on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.model_info import read_json

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
MARKER = "mooncake.json"  # written last into a converted folder: without it the folder is not a model
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


class ModelMissing(ConfigError):
    """The model is not on this machine and cannot be brought here; the message says what to do."""

    code = "model_missing"


@dataclass(frozen=True)
class Progress:
    """``stage`` is "wait", "download", "unpack", "convert" or "done"; ``done`` of ``total`` bytes (0: not known)."""

    stage: str
    done: int = 0
    total: int = 0


ProgressCallback = Callable[[Progress], None]


def cache_root() -> Path:
    """``MOONCAKE_CACHE``, or ``~/.cache/mooncake``."""
    return Path(os.environ.get("MOONCAKE_CACHE") or "~/.cache/mooncake").expanduser()


def default_folder() -> Path | None:
    """Where the converted default model is, None when it is not (or not wholly) there."""
    folder = cache_root() / "models" / DEFAULT_MODEL
    return folder if is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """The marker is there, and every file it names has its size."""
    sizes = read_json(folder / MARKER).get("files", {}) if folder.is_dir() else {}
    return bool(sizes) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def served_name(model: str) -> str:
    """The name under which a model is served when the user gives none: hub ids stay, folders give their last part."""
    if not model:
        return DEFAULT_MODEL
    return Path(model).expanduser().resolve().name if is_local(model) else model


def is_local(model: str) -> bool:
    """Whether ``model`` names a folder rather than a hub id."""
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def resolve_model(name_or_path: str = "", *, progress: ProgressCallback | None = None, fetch: bool = True) -> Path:
    """A folder with config.json, weights and tokenizer.

    "" and the default model's name mean the default model, which is fetched once (``fetch``) into the cache; a
    folder is taken as it is; anything else is a hub id ``owner/name[@revision]``. Raises ModelMissing.
    """
    if is_local(name_or_path) and name_or_path:
        return _folder(name_or_path)
    if name_or_path in ("", DEFAULT_MODEL):
        return _default(progress, fetch)
    return _hub(name_or_path, fetch)


def _folder(path: str) -> Path:
    folder = Path(path).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ModelMissing(f"{folder} is no model folder: it has no config.json", field="model")
    return folder


def _default(progress: ProgressCallback | None, fetch: bool) -> Path:
    if (folder := default_folder()) is not None:
        return folder
    if not fetch:
        raise ModelMissing(
            f"{DEFAULT_MODEL} is not in {cache_root()}: run `mooncake model fetch`, or name another with --model",
            field="model",
        )
    from shared.model_fetch import fetch_default

    return fetch_default(progress)


def _hub(model: str, fetch: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise ModelMissing(f"{model} is no folder, and hub ids need huggingface_hub: {e}", field="model") from e
    name, _, revision = model.partition("@")
    reason = ""
    for local in (True, False) if fetch else (True,):
        try:
            folder = snapshot_download(
                name, revision=revision or None, allow_patterns=list(FILES), local_files_only=local
            )
            if (Path(folder) / "config.json").is_file():
                return Path(folder)
        except Exception as e:  # the hub's client raises whatever its transport does
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    raise ModelMissing(
        f"{model} is neither a folder nor in the hub's cache nor to be had from the hub ({reason}); "
        "name a Hugging Face folder with --model",
        field="model",
    )
