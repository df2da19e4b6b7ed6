"""The commands that need no mesh, as somebody types them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli import config_docs
from cli.checks import Targets, all_checks, available_memory, pyverbs_elsewhere
from cli.main import COMMANDS, main
from shared.config import SECTIONS
from shared.setting import settings_of

ROOT = Path(__file__).resolve().parents[2]
MOONCAKE = Path(sys.executable).with_name("mooncake")


def mooncake(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **env}
    return subprocess.run([MOONCAKE, *argv], capture_output=True, text=True, timeout=200, env=full, check=False)


@pytest.mark.parametrize("group", [[], ["store"], ["model"]])
def test_help_tells_in_whole_words_what_a_command_does(group: list[str]) -> None:
    assert "..." not in CliRunner().invoke(main, [*group, "--help"]).output.partition("Commands:")[2]


def test_help_lists_every_command() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    assert all(name in text for name in (*COMMANDS, "version"))


@pytest.mark.parametrize("command", [*COMMANDS, "version"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0 and "--" in result.output


def test_version_is_that_of_the_distribution() -> None:
    assert json.loads(mooncake("version", "--json").stdout)["version"] == mooncake("version").stdout.strip()


def test_an_unknown_command_is_refused() -> None:
    done = mooncake("upp")
    assert done.returncode == 2 and "No such command 'upp'" in done.stderr


# -- up, before it starts anything --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prot", "1"], "unknown flag --prot (did you mean --port?)"),
        (["--port", "70000"], "<= 65535"),
        (["--transport", "carrier-pigeon"], "auto, shm, tcp or rdma"),
        (["--prefill", "0"], ">= 1"),
        (["--nats", "nats://127.0.0.1:9", "--port", "0"], "--nats: no server answers at nats://127.0.0.1:9"),
        (["--redis", "redis://u:pw@127.0.0.1:9", "--port", "0"], "--redis: no server answers at 127.0.0.1:9"),
        (["--host", "no.such.host.invalid", "--port", "0"], "no.such.host.invalid"),
        (["--ssd-path", "/proc/no/where", "--port", "0"], "--ssd-path: cannot keep files in /proc/no/where"),
        (["--api-keys", "/no/keys.yaml", "--port", "0"], "--api-keys: cannot read the API keys in /no/keys.yaml"),
        (["--pool-bytes", "900TiB", "--port", "0"], "--pool-bytes: 2 pools of 900.0 TiB would not fit into memory"),
    ],
)
def test_up_refuses_what_cannot_work_in_one_sentence(argv: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["up", *argv])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exception
    assert words in done.output and "pw" not in done.output


def test_up_says_that_its_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = mooncake("up", "--port", str(port))
    assert done.returncode == 2
    assert f"cannot serve on 127.0.0.1:{port}: Address already in use" in done.stderr


def test_a_variable_of_somebody_else_is_taken_for_no_other() -> None:
    """All begin with MOONCAKE_: that alone must not look like a slip."""
    said = mooncake("up", "--prefill", "2", "--nats", "nats://127.0.0.1:9", "--port", "0", MOONCAKE_FOO="1").stderr
    assert "MOONCAKE_FOO" in said and "did you mean" not in said


def test_up_names_what_to_do_about_a_missing_model(tmp_path: Path) -> None:
    done = mooncake("up", "--port", "0", "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 2 and "--model" in done.stderr and "Traceback" not in done.stderr


# -- doctor ------------------------------------------------------------------------------------------------


def test_doctor_tells_machines_what_it_tells_people() -> None:
    done = mooncake("doctor", "--json", "--nats", "nats://127.0.0.1:9")
    report = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert done.returncode == 0 and report["ok"] is True
    assert states["python"] == states["nats-server"] == states["valkey-server"] == states["tokenizers"] == "ok"
    assert states["nats"] == "info"
    people = mooncake("doctor").stdout
    assert all(name in people for name in states)


def test_doctor_shows_no_password() -> None:
    checks = all_checks(Targets("http://127.0.0.1:9", "nats://me:hunter2@127.0.0.1:9", "redis://:hunter2@127.0.0.1:9"))
    assert not [check for check in checks if "hunter2" in check.detail]


def test_leftovers_as_json_is_one_document() -> None:
    report = json.loads(mooncake("doctor", "--leftovers", "--json").stdout)
    assert isinstance(report["leftovers"], list)


def test_memory_is_read_from_the_kernel_and_unknown_is_nothing(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:    2048 kB\n")
    assert available_memory(meminfo) == 2 << 20
    assert available_memory(tmp_path / "missing") == 0


def test_pyverbs_of_another_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyverbs").mkdir()
    for name in ("device", "cq"):
        (tmp_path / "pyverbs" / f"{name}.cpython-39-x86_64-linux-gnu.so").touch()
    assert pyverbs_elsewhere((tmp_path, tmp_path / "missing")) == ["cpython-39-x86_64-linux-gnu"]


# -- the page of settings ----------------------------------------------------------------------------------


def test_the_page_of_settings_is_that_of_the_code() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == config_docs.page(), "run `make docs`"


def test_every_setting_is_described_and_on_the_page() -> None:
    page = config_docs.page()
    for section in SECTIONS:
        for setting in settings_of(config_docs.settings_type(section)):
            assert setting.description, f"{section}: {setting.name} needs a description"
            assert f"| `{setting.name}` |" in page
