"""ACCEPTANCE C11: the topology matrix: discovered, parsed, overridden by a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.topology.discovery import Device, Inventory, discover, look, matrix_of
from services.store.transfer.topology.matrix import Matrix, Tiers
from services.store.transfer.topology.override import read_topology
from shared.errors import ConfigError
from tests.transfer.sysfs import Sysfs, two_sockets


def test_c11_nics_of_the_same_numa_node_are_preferred(tmp_path: Path) -> None:
    matrix = discover(two_sockets(tmp_path).root)
    assert matrix.at("cpu:0") == Tiers(("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3"))
    assert matrix.at("cpu:1") == Tiers(("mlx5_2", "mlx5_3"), ("mlx5_0", "mlx5_1"))


def test_c11_nics_behind_the_gpus_switch_are_preferred(tmp_path: Path) -> None:
    matrix = discover(two_sockets(tmp_path).root)
    assert matrix.at("cuda:0") == Tiers(("mlx5_0",), ("mlx5_1", "mlx5_2", "mlx5_3"))
    assert matrix.at("cuda:1") == Tiers(("mlx5_1",), ("mlx5_0", "mlx5_2", "mlx5_3"))


def test_c11_a_gpu_without_a_nic_at_its_switch_prefers_those_of_its_node(tmp_path: Path) -> None:
    matrix = discover(two_sockets(tmp_path).root)
    assert matrix.at("cuda:2") == Tiers(("mlx5_2", "mlx5_3"), ("mlx5_0", "mlx5_1"))


def test_c11_a_node_without_nics_has_no_preferred_ones(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path).node(0).node(1).nic("mlx5_0", ["0000:00:01.0", "0000:01:00.0"], numa=0)
    assert discover(sysfs.root).at("cpu:1") == Tiers((), ("mlx5_0",))


def test_what_the_platform_does_not_say_is_near_to_everything(tmp_path: Path) -> None:
    """Virtual machines often give no NUMA node (-1); software NICs are where their network interface is."""
    sysfs = Sysfs(tmp_path).node(0).node(1).nic("mlx5_0", ["0000:00:03.0"], numa=-1)
    sysfs.software_nic("rxe0", "eth0", ["0000:00:04.0"], numa=1).software_nic("rxe1", "veth9")
    matrix = discover(sysfs.root)
    assert matrix.at("cpu:0") == Tiers(("mlx5_0", "rxe1"), ("rxe0",))
    assert matrix.at("cpu:1") == Tiers(("mlx5_0", "rxe0", "rxe1"))


def test_an_empty_sysfs_is_a_server_without_nics(tmp_path: Path) -> None:
    assert look(tmp_path / "nowhere") == Inventory()
    assert discover(tmp_path) == Matrix({"cpu:0": Tiers()})


def test_this_server_can_be_looked_at() -> None:
    assert "cpu:0" in discover().tiers


def test_displays_of_other_vendors_are_no_gpus(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path).pci(["0000:00:02.0"], numa=0, vendor="0x8086", kind="0x030000")
    sysfs.pci(["0000:00:05.0"], numa=0, vendor="0x10de", kind="0x040300")  # the GPU's sound device
    sysfs.pci(["0000:00:06.0"], numa=0, vendor="0x10de", kind="0x030200")
    assert [gpu.path[-1] for gpu in look(sysfs.root).gpus] == ["0000:00:06.0"]


names = st.text("abcxyz_0123456789", min_size=1, max_size=8)
locations = st.builds(lambda kind, number: f"{kind}:{number}", st.sampled_from(["cpu", "cuda"]), st.integers(0, 9999))


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    tiers = {}
    for location in draw(st.lists(locations, unique=True, max_size=5)):
        nics = draw(st.lists(names, unique=True, max_size=6))
        at = draw(st.integers(0, len(nics)))
        tiers[location] = Tiers(tuple(nics[:at]), tuple(nics[at:]))
    return Matrix(tiers)


@given(matrices())
def test_c11_parse_is_the_inverse_of_format(matrix: Matrix) -> None:
    assert Matrix.parse(matrix.format()) == matrix
    assert Matrix.parse(json.loads(json.dumps(matrix.format())), known=matrix.nics) == matrix


@given(
    st.lists(st.integers(-1, 3), max_size=8),
    st.lists(st.integers(-1, 3), max_size=8),
    st.sets(st.integers(0, 3), min_size=1),
)
def test_every_nic_serves_every_location_once(nics: list[int], gpus: list[int], nodes: set[int]) -> None:
    inventory = Inventory(
        tuple(Device(f"nic{n}", node) for n, node in enumerate(nics)),
        tuple(Device(f"cuda:{n}", node) for n, node in enumerate(gpus)),
        tuple(sorted(nodes)),
    )
    matrix = matrix_of(inventory)
    assert len(matrix.tiers) == len(nodes) + len(gpus)
    for tiers in matrix.tiers.values():
        assert sorted([*tiers.preferred, *tiers.secondary]) == [f"nic{n}" for n in range(len(nics))]


def test_of_an_unknown_location_every_nic_is_as_good() -> None:
    matrix = Matrix.parse({"cpu:0": [["a"], ["b"]], "cuda:0": [["c"], []]})
    assert matrix.at("cuda:7") == Tiers(("a", "b", "c"))


def overridden(tmp_path: Path, text: str) -> Matrix:
    (tmp_path / "topology.yaml").write_text(text)
    return read_topology(str(tmp_path / "topology.yaml"), two_sockets(tmp_path / "sys").root)


@pytest.mark.parametrize(
    "text",
    ['{"cpu:0": [["mlx5_3"], []], "cuda:0": [[], ["mlx5_0"]]}', "cpu:0: [[mlx5_3], []]\ncuda:0: [[], [mlx5_0]]\n"],
    ids=["json", "yaml"],
)
def test_c11_a_file_overrides_what_was_found(tmp_path: Path, text: str) -> None:
    matrix = overridden(tmp_path, text)
    assert matrix == Matrix({"cpu:0": Tiers(("mlx5_3",), ()), "cuda:0": Tiers((), ("mlx5_0",))})


def test_without_a_file_it_is_as_found(tmp_path: Path) -> None:
    root = two_sockets(tmp_path).root
    assert read_topology("", root) == discover(root)


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("cpu:0: [[mlx5_9], []]", "cpu:0", "cpu:0[0]: unknown NIC 'mlx5_9'; this server has mlx5_0, mlx5_1"),
        ("cpu:0: [[mlx5_0], [mlx5_0]]", "cpu:0", "named twice"),
        ("cpu:0: [[mlx5_0]]", "cpu:0", "[[preferred NICs], [secondary NICs]]"),
        ("cpu:0: mlx5_0", "cpu:0", "[[preferred NICs], [secondary NICs]]"),
        ("cpu:0: [[7], []]", "cpu:0", "7 must be a NIC's name"),
        ("cpu0: [[], []]", "cpu0", "'cpu0' must be cpu:N or cuda:N"),
        ("7: [[], []]", "7", "must be cpu:N or cuda:N"),
        ("- cpu:0", "topology", "must map locations"),
        ("", "topology", "must map locations"),
        ("cpu:0: [[], []]\ncpu:0: [[], []]", "topology_file", "cpu:0 is given twice"),
        ("cpu:0: [[", "topology_file", "neither YAML nor JSON"),
        ("? {a: b}\n: c", "topology_file", "neither YAML nor JSON"),
    ],
)
def test_c11_a_wrong_file_is_refused(tmp_path: Path, text: str, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overridden(tmp_path, text)
    assert refused.value.field == field
    assert says in refused.value.message
    assert "topology.yaml" in refused.value.message


def test_c11_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(str(tmp_path / "none.yaml"), tmp_path)


def test_memory_that_is_bound_to_no_node_has_no_preference(tmp_path: Path) -> None:
    assert Matrix.parse({"cpu:0": [["a"], ["b"]], "cuda:0": [["a"], []]}).memory == "cpu:0"
    spread = discover(two_sockets(tmp_path).root)
    assert spread.at(spread.memory) == Tiers(("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"))
