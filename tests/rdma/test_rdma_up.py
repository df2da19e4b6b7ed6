"""A1 over RDMA, required, through ``mooncake up`` itself: eight processes in the guest, and simulated engines, whose KV
bytes depend on every token before them and are checked by whoever uses them. (The import of torch, three times, is
what the guest's one slow processor has no time for: without it the mesh is ready after 40 s.)"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.conftest import tokens
from tests.mesh.mesh import BASE, BLOCK, MODEL, Mesh, start_mesh
from tests.mesh.test_completions_mesh import LONG, test_a1_cold_then_warm_on_another_node_then_warm_local
from tests.rdma.rig import NICS, in_guest, make_words_model, packets

__all__ = ["test_a1_cold_then_warm_on_another_node_then_warm_local", "tokens"]
pytestmark = [pytest.mark.rig, in_guest, pytest.mark.timeout(900)]

FLAGS = ("--engine", "simulated", "--transport", "rdma", "--verify", "always", "--ready-timeout", "600")
WALK = ("--prefill", "2", "--decode", "1", "--policy", "least_loaded", "--pool-bytes", "16MiB")
LAYERS, HEAD_DIM = 2, 16
SLOT = BLOCK * LAYERS * HEAD_DIM * 2 * 4
"""A block is as large as its slot, 8 KiB: what moves can be counted in blocks."""

ENGINE = {
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0.002",  # so slow that fetching a prefix is worth it, even here
    "MOONCAKE_SIMULATED_LAYERS": str(LAYERS),
    "MOONCAKE_SIMULATED_HEAD_DIM": str(HEAD_DIM),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_words_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    log = tmp_path_factory.mktemp("mesh") / "log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE.items():
            patch.setenv(name, value)
        mesh = start_mesh(["--model", str(model), *BASE, *FLAGS, *WALK], log, patience=600)
    yield mesh
    mesh.child.send_signal(signal.SIGINT)
    assert mesh.child.wait(100) == 0, log.read_text()


@pytest.fixture
def transport() -> str:
    return "rdma"


@pytest.fixture
def alone(model: Path) -> Any:
    """Text of a single process with the same engine, as it goes on from the prompt's."""
    from tokenizers import Tokenizer

    from shared.engines.local import LocalRunner
    from shared.engines.simulated import SimulatedEngine, Simulation
    from shared.messages import Sampling

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def run(prompt: list[int]) -> str:
        engine = SimulatedEngine(model, Simulation(layers=LAYERS, head_dim=HEAD_DIM), block_size=BLOCK)
        with LocalRunner(engine, slots=64) as runner:
            sampling = Sampling(max_tokens=16, seed=0, temperature=0.0, stop_ids=sorted(engine.eos_ids))
            outputs = runner.generate(prompt, sampling)
        drawn = [o.token for o in outputs if o.finish != "stop"]
        before, after = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + drawn))
        return str(after[len(before) :])

    return run


@pytest.fixture(autouse=True)
def by_the_devices(mesh: Mesh) -> Iterator[None]:
    """The rig: the devices have counted packets, and the agents' record says which of them moved how much."""
    before, carried = sum(packets(nic) for nic in NICS), mesh.total("mooncake_transfer_rdma_bytes_total")
    yield
    assert sum(packets(nic) for nic in NICS) > before
    for agent in mesh.cluster()["agents"]:
        assert [nic["name"] for nic in agent["nics"]] == list(NICS)
        assert {nic["state"] for nic in agent["nics"]} == {"active"}
    assert mesh.total("mooncake_transfer_rdma_bytes_total") - carried >= LONG * SLOT, "by the transport's own count"
    assert not mesh.total("mooncake_simulated_kv_mismatches_total")
