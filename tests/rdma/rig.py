"""The RDMA guest: its devices and cables, and what shows that RDMA carried the bytes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.cables import carry
from services.store.transfer.base import Result
from services.store.transfer.rdma.transport import Rdma
from tests.transfer.agents import SIZE, Agent, World

MIB = 1 << 20
KIB = 1 << 10
DEVICES = Path("/sys/class/infiniband")
HERE, THERE = ("rxe0", "rxe1"), ("rxe2", "rxe3")
NICS = (*HERE, *THERE)
PATIENCE = 100.0

WORDS = 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}

in_guest = pytest.mark.skipif(
    not all((DEVICES / name).exists() for name in NICS), reason="needs the RDMA guest: make test-rdma"
)


def make_words_model(folder: Path) -> Path:
    """What a simulated engine reads of a model: its shape and its words."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {"w" + "".join(chr(97 + int(digit)) for digit in str(number)): number for number in range(WORDS)}
    Tokenizer(models.WordLevel(words, unk_token="wc")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "wb"}))
    return folder


async def pair(world: World, size: int = SIZE, **options: Any) -> tuple[Agent, Agent]:
    """Two agents with two devices each; ``options`` are those of the second."""
    return await world.agent(rdma_devices=HERE, size=size), await world.agent(rdma_devices=THERE, size=size, **options)


def rdma(agent: Agent) -> Rdma:
    return agent.engine._rdma


def under_way(agent: Agent) -> float:
    """Bytes that its transfers have queued on its NICs."""
    return sum(nic.queued for nic in rdma(agent)._here)


def packets(device: str) -> int:
    """Packets that a device has sent and received, by its own count."""
    folder = DEVICES / device / "ports" / "1" / "hw_counters"
    return sum(int((folder / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


def by_rdma(results: Sequence[Result], length: int) -> None:
    """The rig: these bytes were moved, and by RDMA."""
    assert not [str(result.error) for result in results if result.error]
    assert {result.transport for result in results} == {"rdma"}
    assert sum(result.moved for result in results) == length > 0


def cable(action: str, number: int) -> None:
    """``unplug`` or ``plug`` the cable of a NIC (at the switch), ``down`` or ``up`` its interface."""
    if action in ("plug", "unplug"):
        return carry(f"port{number}", action == "plug")
    subprocess.run(["rdma-nic", action, str(number)], check=True, timeout=PATIENCE)
