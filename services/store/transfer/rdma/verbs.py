"""The distribution's pyverbs, loaded on first use: only it, never the rest of the folder in which it lies."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import ConfigError

if TYPE_CHECKING:
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, Device
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx
    from pyverbs.wr import SGE

DISTRIBUTION = ("/usr/lib/python3/dist-packages",)
REMOVED = "RDMAV_ALLOW_DISASSOC_DESTROY"
"""To libibverbs: what is destroyed on a device that was removed counts as destroyed, for it is."""
APT = "apt install python3-pyverbs ibverbs-providers"

# What the verbs interface calls them; the numbers are part of its ABI.
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
RC = 2
SIGNALED = 2
STATE, STATE_RESET, STATE_READY_TO_SEND = 1, 0, 3
SOFT_ROCE = 0xFFFFFF
PORT_ACTIVE = 4
GID_IB, GID_ROCE_V1, GID_ROCE_V2 = 0, 1, 2
CQ_ERROR, DEVICE_FATAL, PORT_WENT_UP, PORT_WENT_DOWN, GID_CHANGED = 0, 8, 9, 10, 18
WITH_PD, WITH_SEND_OPS = 1, 64
CAN_WRITE, CAN_READ = 1, 16
SUCCESS, LOC_PROT_ERR, FLUSHED, REM_INV_REQ_ERR, REM_ACCESS_ERR, REM_OP_ERR = 0, 4, 5, 9, 10, 11
STATUS = {
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error",
    5: "flushed",
    9: "remote invalid request",
    10: "remote access error",
    11: "remote operation error",
    12: "transport retries exceeded",
    13: "receiver not ready",
    19: "fatal error",
    20: "response time-out",
    21: "general error",
}


class Verbs(NamedTuple):
    """What is used of pyverbs. Nothing in it lets go of the GIL: never call what blocks."""

    devices: Callable[[], list[Device]]
    Context: type[Context]
    PD: type[PD]
    MR: type[MR]
    CompChannel: type[CompChannel]
    CQ: type[CQ]
    QPEx: type[QPEx]
    QPInitAttrEx: type[QPInitAttrEx]
    QPAttr: type[QPAttr]
    QPCap: type[QPCap]
    SGE: type[SGE]
    AHAttr: type[AHAttr]
    GlobalRoute: type[GlobalRoute]
    GID: type[GID]
    Error: type[PyverbsError]


def load() -> Verbs:
    """Raises ConfigError that says what is missing and how to get it."""
    spec = find()
    if spec is None:
        raise ConfigError(f"RDMA needs pyverbs, which is not installed ({APT})", field="transports")
    if why := unloadable(spec):
        raise ConfigError(why, field="transports")
    os.environ.setdefault(REMOVED, "1")
    try:
        if "pyverbs" not in sys.modules:
            module = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = module
            if spec.loader is not None:
                spec.loader.exec_module(module)
        return _import()
    except ImportError as e:
        raise ConfigError(f"pyverbs cannot be loaded: {e} ({APT})", field="transports") from e


def _import() -> Verbs:
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx
    from pyverbs.wr import SGE

    return Verbs(
        devices=get_device_list,
        Context=Context,
        PD=PD,
        MR=MR,
        CompChannel=CompChannel,
        CQ=CQ,
        QPEx=QPEx,
        QPInitAttrEx=QPInitAttrEx,
        QPAttr=QPAttr,
        QPCap=QPCap,
        SGE=SGE,
        AHAttr=AHAttr,
        GlobalRoute=GlobalRoute,
        GID=GID,
        Error=PyverbsError,
    )


def find(folders: tuple[str, ...] = DISTRIBUTION) -> ModuleSpec | None:
    """pyverbs on this interpreter's own path, else in the distribution's folder."""
    try:
        found = importlib.util.find_spec("pyverbs")
    except ValueError:  # loaded by hand before
        found = None
    return found or PathFinder.find_spec("pyverbs", list(folders))


def unloadable(spec: ModuleSpec) -> str:
    """Why this interpreter cannot load it; "" where it can."""
    built = {path.name.partition(".")[2] for path in _extensions(spec)}
    if built & {suffix.removeprefix(".") for suffix in EXTENSION_SUFFIXES}:
        return ""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    tags = ", ".join(sorted(name.partition(".")[0] for name in built)) or "no Python at all"
    return f"pyverbs is built for {tags}, but this is Python {mine}: run the agent with the same minor"


def _extensions(spec: ModuleSpec) -> Iterator[Path]:
    for folder in spec.submodule_search_locations or ():
        yield from Path(folder).glob("device.*.so")


def devices(verbs: Verbs) -> list[str]:
    """Names of the RDMA devices of this machine; none where its kernel knows no RDMA."""
    try:
        return sorted(device.name.decode() for device in verbs.devices())
    except verbs.Error:
        return []


def status_name(status: int) -> str:
    return STATUS.get(status, f"status {status}")
