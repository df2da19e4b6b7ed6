"""``mooncake calibrate``: measure an engine, fit its latency models, and say whether reuse of KV pays on a link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from cli.api import DEFAULT_URL
from cli.calibrate.plots import plot_calibration
from cli.calibrate.report import Machine, calibration_table, figures
from cli.console import err, out, print_json
from cli.link_rate import link_rate as found_rate
from cli.plots import require, writable
from shared.calibration import Calibration, read_calibration, write_calibration
from shared.engines.base import Engine, Timed
from shared.engines.calibrate import clock_of
from shared.engines.calibration import Measured, measure
from shared.engines.peak import measured_peak
from shared.engines.registry import EngineOptions, load_engine, subject
from shared.engines.simulated_settings import SimulatedSettings
from shared.errors import ConfigError, InvalidInput, MooncakeError
from shared.flops import model_flops
from shared.latency import decode_r2, fit_decode, fit_prefill, prefill_r2
from shared.model import resolve_model
from shared.setting import parse_bytes

if TYPE_CHECKING:
    from shared.engines.simulated import Simulation

ENGINES = ("transformers", "simulated")
USUAL_LONGEST = 8192


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long. ``longest``: tokens; 0: the context of the model, up to 8192."""

    engine: EngineOptions
    chunk: int
    longest: int
    most_batch: int
    seconds: float


@click.command(short_help="Measure an engine here, and fit its latency models.")
@click.option("--engine", type=click.Choice(ENGINES), default="transformers", show_default=True)
@click.option("--model", default="", help="A model folder or hub id; default: the default model.")
@click.option("--dtype", default="float32", show_default=True, help="Type of weights and KV.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads that compute.")
@click.option("--device", default="cpu", show_default=True, help="Device of the engine.")
@click.option("--block-size", type=click.IntRange(16, 512), default=32, show_default=True, help="Tokens per KV block.")
@click.option("--prefill-chunk", type=click.IntRange(16, 65536), default=256, show_default=True, help="As instances.")
@click.option("--longest", type=click.IntRange(0), default=0, help="Tokens of the longest prompt; 0: 8192 or less.")
@click.option("--most-batch", type=click.IntRange(1, 1024), default=32, show_default=True, help="Largest decode batch.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=60.0, show_default=True, help="About so long.")
@click.option("--peak", type=click.FloatRange(0, min_open=True), default=None, help="Machine's peak in TFLOP/s.")
@click.option("--link-rate", default="", help="Bytes per second between nodes, as 23GiB; default: measured.")
@click.option("--url", default=DEFAULT_URL, envvar="MOONCAKE_URL", help="Mesh that may have measured its links.")
@click.option("--api-key", default="", envvar="MOONCAKE_API_KEY", help="Key, where that asks for one.")
@click.option("--like", default="", type=click.Path(), help="Engine simulated: take the time that this file says.")
@click.option("--out", "path", default="calibration.json", show_default=True, type=click.Path(dir_okay=False))
@click.option("--plot", default="", type=click.Path(dir_okay=False), help="Write plots, as PNG, SVG or PDF.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, nothing else.")
def calibrate(
    engine: str, model: str, dtype: str, threads: int, device: str, block_size: int, prefill_chunk: int, longest: int,
    most_batch: int, seconds: float, peak: float | None, link_rate: str, url: str, api_key: str, like: str, path: str,
    plot: str, as_json: bool,
) -> None:  # fmt: skip
    """Measure an engine on this machine and fit its latency models.

    The file that is written spares instances to measure themselves (`mooncake up --latency-model FILE`), and makes the
    engine `simulated` take the time of the engine that was measured. Measure with the same dtype, threads and device as
    are served, on a machine that does nothing else.
    """
    try:
        require(plot)
        writable(path, "out")
        options = EngineOptions(engine, model, dtype, block_size, threads, device, 0, _simulation(engine, like))
        plan = Plan(options, prefill_chunk, longest, most_batch, seconds)
        said = _bytes(link_rate)
        kept, machine = measured(plan, peak)
        write_calibration(path, kept)  # before anything else that may fail
        found = figures(kept, machine, found_rate(said, url, api_key))
        if plot:
            plot_calibration(plot, kept, found)
    except (MooncakeError, OSError) as error:
        raise click.ClickException(getattr(error, "message", str(error))) from None
    if as_json:
        print_json({**found, "file": path})
        return
    out.print(calibration_table(found))
    err.print(f"{path}: for `mooncake up --latency-model {path}`", style="dim", markup=False)


def measured(plan: Plan, peak_tflops: float | None) -> tuple[Calibration, Machine]:
    """Loads, measures and fits; blocking. Raises ConfigError where the engine cannot be had."""
    engine = load_engine(plan.engine)
    samples = _measured(engine, plan)
    prefills, decodes = samples.prefill_samples(), samples.decode_samples()
    prefill, decode = fit_prefill(prefills), fit_decode(decodes)
    geometry = engine.namespace.geometry
    kept = Calibration(
        subject=subject(engine, plan.engine),
        prefill=prefill,
        decode=decode,
        kv_bytes=geometry.layers * geometry.token_bytes,
        chunk=plan.chunk,
        prefill_r2=prefill_r2(prefill, prefills),
        decode_r2=decode_r2(decode, decodes),
        prefill_samples=prefills,
        decode_samples=decodes,
    )
    return kept, _machine(engine, plan.engine, peak_tflops)


def _measured(engine: Engine, plan: Plan) -> Measured:
    longest = plan.longest or USUAL_LONGEST
    clock = clock_of(engine, plan.engine.threads, plan.engine.device)
    with _progress() as told:
        return measure(engine, plan.chunk, longest, plan.most_batch, plan.seconds, clock, told)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """On terminals."""
    columns = (*Progress.get_default_columns()[:2], TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=min(share, 1.0))


def _machine(engine: Engine, options: EngineOptions, peak_tflops: float | None) -> Machine:
    """MFU is of real engines; for a simulated one only where the peak of what it simulates is given."""
    try:
        flops = model_flops(resolve_model(options.model))
    except ConfigError as error:
        return Machine(None, None, error.message)
    if peak_tflops is not None:
        return Machine(flops, peak_tflops * 1e12, "as given")
    if isinstance(engine, Timed):
        return Machine(flops, None, "a simulated engine computes nothing; --peak gives a machine's")
    peak = measured_peak(engine.namespace.dtype, options.threads, options.device)
    return Machine(flops, peak, f"products of matrices in {engine.namespace.dtype}, measured")


def _simulation(engine: str, like: str) -> Simulation | None:
    """Of the engine ``simulated``: that of the usual settings, with the time of another engine where it is named."""
    if engine != "simulated":
        if like:
            raise ConfigError("--like is for the engine simulated")
        return None
    described = SimulatedSettings().described
    if not like:
        return described
    kept = read_calibration(like)
    return replace(described, prefill=kept.prefill, decode=kept.decode)


def _bytes(text: str) -> float | None:
    if not text:
        return None
    try:
        return float(parse_bytes(text))
    except ValueError as error:
        raise InvalidInput(f"--link-rate: {error}", field="link_rate") from None
