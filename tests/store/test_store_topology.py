"""The topology of a store agent: from a file, and told to the mesh in its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.store.agent import Agent, run_agent
from services.store.directory import Board, LocalDirectory
from services.store.settings import StoreSettings
from services.store.transfer.topology.matrix import Matrix, Tiers
from shared.errors import ConfigError


async def test_c11_an_override_file_with_an_unknown_nic_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("cpu:0: [[no_such_nic], []]\n")
    settings = StoreSettings(socket=f"@{tmp_path}", pool_bytes=1 << 20, topology_file=str(file))
    with pytest.raises(ConfigError, match=r"topology\.yaml: cpu:0\[0\]: unknown NIC 'no_such_nic'"):
        async with run_agent(settings, LocalDirectory(Board())):
            pytest.fail("it started")


async def test_the_topology_is_in_the_agents_record(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_text('{"cpu:0": [[], []]}')
    settings = StoreSettings(socket=f"@{tmp_path}", pool_bytes=1 << 20, topology_file=str(tmp_path / "topology.json"))
    async with run_agent(settings, LocalDirectory(Board())) as agent:
        assert agent.topology == Matrix({"cpu:0": Tiers()})
        assert agent.record().topology == {}  # no NICs: nothing to say
        _give_nics(agent)
        assert agent.record().topology == {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}


def _give_nics(agent: Agent) -> None:
    agent.topology = Matrix({"cpu:0": Tiers(("mlx5_0",), ("mlx5_1",))})
