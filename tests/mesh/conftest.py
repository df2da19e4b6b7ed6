"""Whole meshes of real processes over the tiny model, and the single process that their answers are compared with."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from shared.messages import Sampling
from tests.mesh.mesh import BASE, BLOCK, MODEL, Mesh, start_mesh

if TYPE_CHECKING:
    from shared.engines.local import LocalRunner

CONTEXT = 262_144
"""Of the simulated engine."""
AT_ONCE = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0",
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": "0",
    "MOONCAKE_SIMULATED_DECODE_BASE_S": "0.001",
    "MOONCAKE_PREFILL_CHUNK": "4096",
    "MOONCAKE_MAX_BATCH": "512",
    "MOONCAKE_STALL_TIMEOUT_S": "2",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama. The folder's name is the served model's."""
    from shared.engines.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


class Alone(Protocol):
    """The single process: text of a completion."""

    def __call__(self, prompt: Sequence[int], max_tokens: int = 16, **sampling: Any) -> str: ...


@pytest.fixture(scope="session")
def runner(tiny: Path) -> LocalRunner:
    """The same engine in this process, without any mesh."""
    from shared.engines.local import LocalRunner
    from shared.engines.transformers import TransformersEngine

    return LocalRunner(TransformersEngine(tiny, block_size=BLOCK), slots=256)


@pytest.fixture(scope="session")
def alone(tiny: Path, runner: LocalRunner) -> Alone:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))

    def run(prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> str:
        stops = sorted({*runner.engine.eos_ids, *options.pop("stop_ids", ())})
        sampling = Sampling(**{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, "stop_ids": stops, **options})
        outputs = runner.generate(np.array(prompt, dtype=np.uint32), sampling)
        ids = [o.token for o in outputs if not (o.finish == "stop" and o.token in stops)]
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return run


@pytest.fixture(scope="session")
def first_token(runner: LocalRunner) -> Callable[[Sequence[int]], int]:
    """The id of the first output of a greedy completion."""
    sampling = Sampling(max_tokens=1, seed=0, temperature=0.0)
    return lambda prompt: runner.generate(np.array(prompt, dtype=np.uint32), sampling)[0].token


class Meshes:
    """The mesh that runs with these flags, or a new one. Only the last one stays, and only while tests ask for it: an
    idle mesh takes a twelfth of a core. tests/units.py keeps the tests of a mesh together."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        self._model, self._folders = model, folders
        self._running: tuple[tuple[str, ...], Mesh] | None = None
        self._ending: list[Mesh] = []

    def __call__(self, *flags: str) -> Mesh:
        if self._running is not None and self._running[0] == flags and self._running[1].child.poll() is None:
            return self._running[1]
        self.end()
        mesh = start_mesh(["--model", str(self._model), *BASE, *flags], self._folders.mktemp("mesh") / "log")
        self._running = flags, mesh
        return mesh

    def end(self) -> None:
        """It ends while other tests run or the next one starts."""
        if self._running is not None and self._running[1].child.poll() is None:
            self._running[1].child.send_signal(signal.SIGINT)
            self._ending.append(self._running[1])
        self._running = None

    def close(self) -> None:
        self.end()
        for mesh in self._ending:
            assert mesh.child.wait(60) == 0, mesh.log.read_text()


MESHES = pytest.StashKey[Meshes]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A mesh that the next test does not ask for does not wait for the end of the session."""
    meshes = item.config.stash.get(MESHES, None)
    if meshes is not None and "up" not in getattr(nextitem, "fixturenames", ()):
        meshes.end()


@pytest.fixture(scope="session")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Meshes]:
    """``up(*flags)`` starts a mesh, or gives the one that runs with these flags."""
    meshes = pytestconfig.stash[MESHES] = Meshes(tiny, tmp_path_factory)
    yield meshes
    meshes.close()


@pytest.fixture(scope="module")
def real_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Mesh]]:
    """``real_up(*flags)``: a mesh of the default model, fetched where it is not in the cache."""
    running: list[Mesh] = []

    def start(*flags: str) -> Mesh:
        running.append(start_mesh(flags, tmp_path_factory.mktemp("real") / "log", patience=240))
        return running[-1]

    yield start
    for one in running:
        assert one.stop() == 0, one.log.read_text()


@pytest.fixture(scope="session")
def walk(up: Callable[..., Mesh]) -> Callable[..., Mesh]:
    """``walk(transport)``: two prefill nodes that take turns, and a decode node; every fetched block is checked."""
    return lambda transport: up(
        *("--prefill", "2", "--decode", "1", "--policy", "least_loaded"), "--transport", transport, "--verify", "always"
    )


@pytest.fixture(scope="session")
def unverified(up: Callable[..., Mesh]) -> Callable[[], Mesh]:
    """A prefill node and two decode nodes, all over TCP; nothing that is fetched is checked."""
    return lambda: up("--prefill", "1", "--decode", "2", "--transport", "tcp", "--verify", "off")


@pytest.fixture(scope="session")
def simulated(up: Callable[..., Mesh]) -> Callable[[], Mesh]:
    """A mesh that takes no time for a prompt of any length, and a millisecond for a token."""

    def start() -> Mesh:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in AT_ONCE.items():
                patch.setenv(name, value)
            return up("--engine", "simulated", "--context-length", str(CONTEXT), "--pool-bytes", "512MiB")

    return start


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Fresh token ids, other ones for every test and call."""
    rng = random.Random(request.node.nodeid)
    return lambda count: [rng.randrange(10, 250) for _ in range(count)]
