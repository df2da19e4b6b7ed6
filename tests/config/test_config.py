"""Settings: flag > variable > YAML (own section > top) > default; whatever is wrong names its source and the limit."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from shared import config
from shared.config import SECRET, CommonSettings, load
from shared.errors import ConfigError
from shared.setting import parse_bytes, settings_of, show


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


Positive = Annotated[float, Meta(gt=0)]


class Example(CommonSettings, frozen=True, kw_only=True):
    size: Annotated[int, Meta(description="A size.", ge=16, le=512)] = 32
    pool_bytes: Annotated[int, Meta(description="A pool.", ge=1024)] = 4096
    share: Annotated[float, Meta(description="A share.", ge=0, le=1)] = 0.5
    wait_s: Annotated[Positive, Meta(description="A wait.")] = 1.0
    fast: Annotated[bool, Meta(description="A truth.")] = False
    names: Annotated[tuple[str, ...], Meta(description="Some names.")] = ()
    numbers: Annotated[list[int], Meta(description="Some numbers.")] = msgspec.field(default_factory=list)
    limit: Annotated[float | None, Meta(description="Perhaps a limit.")] = None
    colour: Annotated[Colour, Meta(description="A colour.")] = Colour.RED
    policy: Annotated[Literal["paper", "random"], Meta(description="A policy.")] = "paper"
    secret: Annotated[str, Meta(description="A secret.", extra=SECRET, max_length=8)] = ""

    def __post_init__(self) -> None:
        if self.size == 100:
            raise ValueError("size must not be 100")


def loaded(*argv: str, env: Mapping[str, str] | None = None) -> Example:
    return load(Example, argv, env or {}, prog="store")


def refused(*argv: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(*argv, env=env)
    return error.value.message


def written(folder: Path, text: str) -> str:
    path = folder / "mesh.yaml"
    path.write_text(text)
    return str(path)


# -- precedence --------------------------------------------------------------------------------------------


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "size: 64\n")
    env = {"MOONCAKE_SIZE": "128"}
    assert loaded().size == 32
    assert loaded("--config", file).size == 64
    assert loaded("--config", file, env=env).size == 128
    assert loaded("--config", file, "--size", "256", env=env).size == 256
    assert loaded(env={"MOONCAKE_CONFIG": file}).size == 64


def test_the_own_section_beats_the_top_and_others_do_not_count(tmp_path: Path) -> None:
    file = written(tmp_path, "size: 64\nstore: {size: 128}\ndecode: {whatever: 1}\n")
    assert loaded("--config", file).size == 128
    assert load(Example, ["--config", file], {}, prog="prefill").size == 64


def test_an_empty_file_and_an_empty_section_mean_the_defaults(tmp_path: Path) -> None:
    assert loaded("--config", written(tmp_path, "")) == Example()
    assert loaded("--config", written(tmp_path, "store:\n")) == Example()


def test_the_section_comes_from_the_module_of_a_service() -> None:
    class Settings(CommonSettings, frozen=True, kw_only=True):
        pass

    Settings.__module__ = "services.decode.settings"
    assert config.service_name(Settings) == "decode"
    assert config.service_name(Example) == ""


# -- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--size", "64"], "size", 64),
        (["--size=64"], "size", 64),
        (["--pool-bytes", "2MiB"], "pool_bytes", 2 << 20),
        (["--pool-bytes", "4096"], "pool_bytes", 4096),
        (["--share", "0.25"], "share", 0.25),
        (["--fast"], "fast", True),
        (["--fast", "--no-fast"], "fast", False),
        (["--fast=false"], "fast", False),
        (["--fast=yes"], "fast", True),
        (["--names", "a, b,,c"], "names", ("a", "b", "c")),
        (["--names="], "names", ()),
        (["--numbers", "1,2"], "numbers", [1, 2]),
        (["--limit", "3.5"], "limit", 3.5),
        (["--limit", "none"], "limit", None),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--policy", "random"], "policy", "random"),
        (["--secret", "--odd"], "secret", "--odd"),
        (["--size", "64", "--size", "65"], "size", 65),
    ],
)
def test_text_becomes_the_type_of_the_field(argv: Sequence[str], field: str, value: Any) -> None:
    assert getattr(loaded(*argv), field) == value


def test_variables_read_as_flags_do() -> None:
    env = {"MOONCAKE_FAST": "on", "MOONCAKE_NAMES": "x,y", "MOONCAKE_POOL_BYTES": "1g", "MOONCAKE_LIMIT": ""}
    found = loaded(env=env)
    assert (found.fast, found.names, found.pool_bytes, found.limit) == (True, ("x", "y"), 1 << 30, None)


def test_yaml_values_keep_their_types(tmp_path: Path) -> None:
    text = "size: 64\nfast: true\nnames: [a, b]\npool_bytes: 1MiB\nlimit: null\ncolour: blue\n"
    found = loaded("--config", written(tmp_path, text))
    assert (found.size, found.fast, found.names, found.pool_bytes) == (64, True, ("a", "b"), 1 << 20)
    assert (found.limit, found.colour) == (None, Colour.BLUE)


@given(st.integers(0, 2**20), st.sampled_from(["", "b", "k", "M", "Gi", "kB", "MiB", " TiB"]))
def test_sizes_in_every_unit(count: int, unit: str) -> None:
    factor = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}[unit.strip().lower()[:1]]
    assert parse_bytes(f"{count}{unit}") == count * factor


# -- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--size", "8"], ["flag --size", "'8'", ">= 16", "<= 512"]),
        (["--size", "many"], ["flag --size", "'many'", "int"]),
        (["--size", "6.5"], ["flag --size", "int"]),
        (["--share", "nan"], ["flag --share", "<= 1"]),
        (["--wait-s", "0"], ["flag --wait-s", "> 0"]),
        (["--fast=perhaps"], ["--fast", "true or false"]),
        (["--numbers", "1,x"], ["flag --numbers", "list of int"]),
        (["--colour", "green"], ["flag --colour", "red or blue"]),
        (["--policy", "papper"], ["flag --policy", "paper or random"]),
        (["--pool-bytes", "lots"], ["flag --pool-bytes", "64MiB"]),
        (["--pool-bytes", "1k", "--pool-bytes", "1023"], [">= 1024"]),
        (["--sise", "64"], ["unknown flag --sise", "did you mean --size?"]),
        (["--si", "64"], ["unknown flag --si"]),
        (["--no-size"], ["unknown flag --no-size"]),
        (["64"], ["unknown argument 64"]),
        (["--size"], ["--size needs a value"]),
        (["--size", "100"], ["size must not be 100"]),
        (["--mesh", "a b"], ["flag --mesh"]),
        (["--mesh", "a\n"], ["flag --mesh"]),
        (["--metrics-port", "65536"], ["<= 65535"]),
        (["--config", "/no/such/file"], ["/no/such/file", "No such file"]),
    ],
)
def test_a_wrong_flag_is_refused_with_its_name_and_the_limit(argv: Sequence[str], words: Sequence[str]) -> None:
    message = refused(*argv)
    assert all(word in message for word in words), message


def test_a_wrong_variable_is_named() -> None:
    assert "variable MOONCAKE_SIZE" in refused(env={"MOONCAKE_SIZE": "8"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sise: 64", ["unknown key sise", "did you mean size?"]),
        ("store: {sise: 64}", ["unknown key store.sise"]),
        ("size: 8", ["key size", ">= 16"]),
        ("size: true", ["key size", "int"]),
        ("size: 64\nsize: 65", ["line 2", "size is written twice"]),
        ("store: 5", ["section store"]),
        ("- a\n- b", ["keys and values"]),
        ("a: [", ["is no YAML"]),
        ("64: 5", ["unknown key 64"]),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, text: str, words: Sequence[str]) -> None:
    file = written(tmp_path, text)
    message = refused("--config", file)
    assert file in message
    assert all(word in message for word in words), message


def test_a_secret_is_in_no_message() -> None:
    assert "hunter2hunter2" not in refused("--secret", "hunter2hunter2")
    assert "hunter2hunter2" not in refused(env={"MOONCAKE_SECRET": "hunter2hunter2"})


def test_a_setting_without_default_is_required() -> None:
    class Needs(CommonSettings, frozen=True, kw_only=True):
        name: Annotated[str, Meta(description="A name.")]

    with pytest.raises(ConfigError, match=r"--name \(or MOONCAKE_NAME\) is required"):
        load(Needs, [], {})
    assert load(Needs, ["--name", "x"], {}).name == "x"


# -- unknown variables -------------------------------------------------------------------------------------


def test_unknown_variables_warn_once_and_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    env = {"MOONCAKE_SISE": "1", "MOONCAKE_NATS_SERVICE_HOST": "10.0.0.1", "MOONCAKE_CACHE": "/x", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING):
        assert loaded(env=env) == Example()
        assert loaded(env=env) == Example()
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "MOONCAKE_SISE (did you mean MOONCAKE_SIZE?)" in message and "MOONCAKE_NATS_SERVICE_HOST" in message
    assert "MOONCAKE_CACHE" not in message


def test_variables_of_others_are_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    load(Example, [], {"MOONCAKE_LEASE_TTL": "1"}, others={"MOONCAKE_LEASE_TTL"})
    assert not caplog.records


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        ([], "/env"),
        (["--config", "/a"], "/a"),
        (["--config=/a", "--size", "1", "--config", "/b"], "/b"),
        (["--secret", "--config"], "/env"),
    ],
)
def test_the_last_config_flag_names_the_file(argv: Sequence[str], file: str) -> None:
    flags = config.from_flags(settings_of(Example), argv)
    assert config.config_file(flags, {"MOONCAKE_CONFIG": "/env"}) == file


# -- the process's own command line ------------------------------------------------------------------------


def test_a_wrong_command_line_ends_the_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--size", "8"])
    with pytest.raises(SystemExit) as end:
        load(Example, env={}, prog="store")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("store: flag --size: '8' is refused")


def test_help_names_every_setting_with_default_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        loaded("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(setting.flag in text and setting.description in text for setting in settings_of(Example))
    assert ">= 16, <= 512, default 32" in text


def test_defaults_are_shown_as_they_would_be_written() -> None:
    shown = {setting.name: show(setting) for setting in settings_of(Example)}
    assert shown["size"] == "32" and shown["fast"] == "false" and shown["names"] == "none"
    assert shown["pool_bytes"] == "4KiB"
    assert shown["limit"] == "none" and shown["colour"] == "red" and shown["secret"] == "none"
