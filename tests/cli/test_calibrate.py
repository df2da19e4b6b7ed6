"""``mooncake calibrate`` as people use it, over the simulated engine; and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cli.calibrate.report import Machine, calibration_table, figures, sentences
from cli.link_rate import LinkRate, link_rate, loopback_rate
from cli.main import main
from shared.calibration import Calibration, Subject, read_calibration, write_calibration
from shared.flops import Flops
from shared.latency import DecodeModel, DecodeSample, PrefillModel, PrefillSample
from tests.bare_model import bare_model
from tests.cli.fake_conductor import CLUSTER, fake_conductor

KEPT = Calibration(
    subject=Subject(engine="transformers", model="m", weights="w", dtype="float32", threads=1, device="cpu"),
    prefill=PrefillModel(0.01, 1e-4, 0.0),
    decode=DecodeModel(0.002, 1e-3, 0.0),
    kv_bytes=1000,
    chunk=256,
    prefill_r2=0.99,
    decode_r2=0.98,
    prefill_samples=[PrefillSample(100, 0, 0.02), PrefillSample(1000, 500, 0.05)],
    decode_samples=[DecodeSample(1, 64, 0.003), DecodeSample(8, 512, 0.01)],
)
GIVEN = LinkRate(2e7, "as given")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_model(tmp_path_factory.mktemp("calibrate"))


def run(*argv: str) -> Result:
    return CliRunner().invoke(main, ["calibrate", *argv])


def test_a_calibration_is_written_and_taken_again(folder: Path, tmp_path: Path) -> None:
    first, second, plot = (str(tmp_path / name) for name in ("first.json", "second.json", "plot.svg"))
    usual = ("--engine", "simulated", "--model", str(folder), "--seconds", "0.3", "--link-rate", "1000000000", "--json")
    done = run(*usual, "--out", first, "--plot", plot, "--longest", "512")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["file"] == first and found["reuse"]["link_rate"] == 1e9
    assert found["mfu_max"] is None and found["prefill"]["linear"] > 0
    assert read_calibration(first).subject.engine == "simulated" and "<svg" in Path(plot).read_text()
    write_calibration(first, KEPT)
    again = run(*usual, "--like", first, "--out", second, "--peak", "1", "--longest", "64")
    assert again.exit_code == 0 and json.loads(again.stdout)["mfu_max"] > 0


def test_figures_of_a_machine() -> None:
    found = figures(KEPT, Machine(Flops(1e6, 0, 0), 1e11, "as given"), GIVEN)
    assert found["prefill_samples"][0] == {"n": 100, "p": 0, "seconds": 0.02, "model": 0.02, "error": 0.0, "mfu": 0.05}
    assert found["prefill_error"] == {"median": pytest.approx(0.1), "max": pytest.approx(0.2)}
    assert found["mfu_max"] == pytest.approx(0.1)
    assert found["reuse"]["pays_from_tokens"] == 1
    json.dumps(found)


@pytest.mark.parametrize(
    ("model", "rate", "says"),
    [
        (PrefillModel(0.01, 1e-4, 0.0), 2e7, "loading any prefix takes less time"),
        (PrefillModel(0.01, 1e-4, 0.0), 1e6, "Reuse does not pay over 976.6 KiB/s (as given)"),
        (PrefillModel(0.01, 1e-4, 1e-7), 5.001e6, "from 1,000 tokens of prefix on"),
        (PrefillModel(0.01, 0.0, 0.0), 5e6, "Reuse does not pay"),
    ],
)
def test_equation_two_is_answered_in_words(model: PrefillModel, rate: float, says: str) -> None:
    import msgspec

    found = figures(
        msgspec.structs.replace(KEPT, prefill=model), Machine(None, None, "why"), LinkRate(rate, "as given")
    )
    said = sentences(found)
    assert says in said[-1] and said[2] == "MFU: not known (why)"
    console = Console(width=200)
    with console.capture() as shown:
        console.print(calibration_table(found))
    assert "tokens attended to" in shown.get()


def test_the_link_s_rate_is_the_first_that_is_known() -> None:
    assert link_rate(5.0, "http://127.0.0.1:1", "") == LinkRate(5.0, "as given")
    with fake_conductor() as conductor:
        agents: list[dict[str, Any]] = [{"rate": rate} for rate in (0.0, 2e9, 4e9, 9e9)]
        conductor.answers["/cluster"] = (200, {}, {**CLUSTER, "agents": agents})
        assert link_rate(None, conductor.url, "").rate == 4e9
    assert loopback_rate(4 << 20) > 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--link-rate", "fast"), "--link-rate"),
        (("--plot", "x.doc"), ".png"),
        (("--like", "x.json", "--engine", "transformers"), "--like is for the engine simulated"),
        (("--like", "x.json", "--engine", "simulated"), "x.json: No such file"),
        (("--dtype", "int3", "--engine", "simulated"), "int3"),
    ],
)
def test_what_cannot_be_is_said_at_once(argv: tuple[str, ...], says: str, folder: Path, tmp_path: Path) -> None:
    done = run("--model", str(folder), "--out", str(tmp_path / "c.json"), "--seconds", "0.1", *argv)
    assert done.exit_code == 1 and says in done.output
