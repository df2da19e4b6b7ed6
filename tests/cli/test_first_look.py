"""What is seen before anything starts: each refusal names the flag, and what works leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli import first_look
from cli.first_look import folder_takes_files, keys_can_be_read, memory_limit, pools_fit, port_claimed
from shared.embedded import free_port
from shared.errors import ConfigError


def test_a_folder_is_made_and_stays_empty(tmp_path: Path) -> None:
    folder_takes_files("--ssd-path", str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--ssd-path: cannot keep files in .*file"):
        folder_takes_files("--ssd-path", str(tmp_path / "file"))


def test_pools_up_to_the_memory_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = memory_limit()
    pools_fit(1, there)
    with pytest.raises(ConfigError, match="2 pools of"):
        pools_fit(2, there // 2 + 1)
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr(first_look, "LIMITS", (tmp_path / "none", limit))
    assert memory_limit() == 1 << 20
    with pytest.raises(ConfigError, match=r"a pool of 2.0 MiB would not fit into memory \(1.0 MiB\)"):
        pools_fit(1, 2 << 20)
    limit.write_text("max\n")
    assert memory_limit() == there


def test_keys_that_cannot_be_read_are_said_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: {acme: {keys: [sk-acme-0123456789]}}\n")
    keys_can_be_read(str(file))
    file.write_text("tenants: {acme: {keys: sk-acme-0123456789}}\n")
    with pytest.raises(ConfigError, match="--api-keys: ") as refused:
        keys_can_be_read(str(file))
    assert "sk-acme" not in refused.value.message


def test_a_file_that_is_no_calibration_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        first_look.is_calibration(str(tmp_path / "calibration.json"))


def test_two_meshes_that_start_at_the_same_time_do_not_share_a_port() -> None:
    """Several conductors listen on one port together: those of another mesh would be among them, unseen."""
    port = free_port()
    with port_claimed("127.0.0.1", port):
        with pytest.raises(ConfigError, match="another mesh is there, or about to be"), port_claimed("127.0.0.1", port):
            pass
        with port_claimed("127.0.0.1", free_port()):
            pass
    with port_claimed("127.0.0.1", port):
        pass
