"""The RDMA devices that an agent uses: found, opened, and watched for what they say of themselves."""

from __future__ import annotations

from collections.abc import Sequence

from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.verbs import Verbs, devices, load
from services.store.transfer.topology.matrix import Matrix, Tiers
from shared.errors import ConfigError, MooncakeError, NoTransport
from shared.telemetry import log

logger = log("transfer.rdma")


def open_all(wanted: Sequence[str], topology: Matrix, completions: int) -> tuple[list[Nic], Matrix]:
    """The NICs to use, in the matrix' order, and where they are. ``wanted``: only these (empty: all that ``topology``
    names). ``completions``: see :class:`Nic`. Raises ConfigError, NoTransport that say what is missing."""
    verbs = load()
    found = devices(verbs)
    if unknown := [name for name in wanted if name not in found]:
        here = ", ".join(found) or "none"
        raise ConfigError(f"no RDMA device {unknown[0]!r} here; there are {here}", field="rdma_devices")
    if not found:
        raise NoTransport("this machine has no RDMA device")
    matrix = _only(topology, [name for name in found if name in (wanted or found)])
    nics = _open(verbs, matrix.nics, completions)
    return nics, _only(matrix, [nic.name for nic in nics])


def _only(matrix: Matrix, names: Sequence[str]) -> Matrix:
    """Without other NICs. Where nothing is known of any of them, they are all near the memory of node 0."""

    def left(tier: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in tier if name in names)

    tiers = {place: Tiers(left(known.preferred), left(known.secondary)) for place, known in matrix.tiers.items()}
    cut = Matrix(tiers)
    return cut if cut.nics else Matrix({"cpu:0": Tiers(tuple(names))})


def _open(verbs: Verbs, names: Sequence[str], completions: int) -> list[Nic]:
    opened: list[Nic] = []
    errors: list[MooncakeError] = []
    for name in names:
        try:
            opened.append(Nic(verbs, name, completions))
        except NoTransport as e:
            logger.warning("a NIC is left out", nic=name, error=e.message)
            errors.append(e)
    if not opened:
        raise errors[0]
    return opened
