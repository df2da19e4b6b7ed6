"""Engines by name. Loading one imports its library, nothing before does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shared.calibration import Subject
from shared.engines.base import Engine
from shared.errors import ConfigError
from shared.fingerprint import canonical_dtype

if TYPE_CHECKING:
    from shared.engines.simulated import Simulation


class EngineSettings(Protocol):
    """What an engine is loaded from; services' settings have these fields. ``model``: a folder, a hub id, or "" for
    the default model."""

    @property
    def engine(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def simulation(self) -> Simulation | None:
        """Of the engine ``simulated``; None: as fast as possible."""


@dataclass(frozen=True)
class EngineOptions:
    """:class:`EngineSettings` for callers without settings of their own."""

    engine: str = "transformers"
    model: str = ""
    dtype: str = "float32"
    block_size: int = 32
    threads: int = 1
    device: str = "cpu"
    context_length: int = 0
    simulation: Simulation | None = None


def _transformers(settings: EngineSettings) -> Engine:
    from shared.model import resolve_model, served_name

    if settings.context_length:
        raise ConfigError("the engine transformers has its model's context length", field="context_length")
    folder = resolve_model(settings.model)
    try:
        from shared.engines.transformers import TransformersEngine
    except ImportError as e:
        raise ConfigError(f"the engine transformers needs torch and transformers: {e}", field="engine") from e
    return TransformersEngine(
        folder,
        dtype=canonical_dtype(settings.dtype),
        block_size=settings.block_size,
        threads=settings.threads,
        device=settings.device,
        name=served_name(settings.model),
    )


def _simulated(settings: EngineSettings) -> Engine:
    from shared.engines.simulated import SimulatedEngine
    from shared.model import resolve_model, served_name

    return SimulatedEngine(
        resolve_model(settings.model),
        settings.simulation,
        dtype=canonical_dtype(settings.dtype),
        block_size=settings.block_size,
        name=served_name(settings.model),
    )


ENGINES: dict[str, Callable[[EngineSettings], Engine]] = {"simulated": _simulated, "transformers": _transformers}


def subject(engine: Engine, settings: EngineSettings) -> Subject:
    """What a calibration of this engine is of."""
    return Subject(
        engine=settings.engine,
        model=str(getattr(engine, "name", "")),
        weights=engine.namespace.weights,
        dtype=engine.namespace.dtype,
        threads=settings.threads,
        device=settings.device,
    )


def load_engine(settings: EngineSettings) -> Engine:
    """Blocking, seconds to minutes. Raises ConfigError for an unknown engine or a model it cannot serve."""
    loader = ENGINES.get(settings.engine)
    if loader is None:
        raise ConfigError(f"engine {settings.engine!r} is none of {', '.join(sorted(ENGINES))}", field="engine")
    return loader(settings)
