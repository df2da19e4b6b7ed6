"""Settings of a store agent."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from msgspec import Meta

from services.store.transfer.policy import KNOWN
from shared.config import SECRET, CommonSettings

Verify = Literal["always", "sample", "off"]


def is_loopback(host: str) -> bool:
    """Only processes of this machine (or container) reach a socket there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class StoreSettings(CommonSettings, frozen=True, kw_only=True):
    """See :mod:`shared.config` for how they are given."""

    node: Annotated[str, Meta(description="Name of this node for people; empty: the host's name.", max_length=253)] = ""
    id: Annotated[
        str,
        Meta(
            description="Identity of this agent in the mesh; empty: a new one at each start.",
            pattern=r"^[A-Za-z0-9_-]{0,64}$",
        ),
    ] = ""
    socket: Annotated[
        str,
        Meta(
            description="Unix socket for the engines of this node: a path, or @name for an abstract one.", min_length=2
        ),
    ] = "@mooncake-store"
    secret: Annotated[
        str, Meta(description="Shared secret of all agents and engines of the mesh.", extra=SECRET, max_length=1024)
    ] = ""
    host: Annotated[str, Meta(description="Address of the data plane; IPv6 without brackets.")] = "127.0.0.1"
    advertise: Annotated[
        str,
        Meta(
            description="Address that peers are told; empty: `host`, and where that is a wildcard such as 0.0.0.0 the "
            "address by which Redis is reached."
        ),
    ] = ""
    port: Annotated[int, Meta(description="Port of the data plane; 0 picks a free one.", ge=0, le=65535)] = 0
    data_tls_cert: Annotated[
        str,
        Meta(
            description="PEM file of this agent's certificate; with one, TLS is spoken and asked for on the data port."
        ),
    ] = ""
    data_tls_key: Annotated[str, Meta(description="PEM file of the certificate's key.")] = ""
    data_tls_ca: Annotated[
        str, Meta(description="PEM file of the authorities whose certificates peers may show, names apart.")
    ] = ""
    data_streams: Annotated[int, Meta(description="TCP connections that carry data to a peer.", ge=1, le=64)] = 2
    data_connections: Annotated[
        int, Meta(description="Connections that peers may have open to this agent, together.", ge=1)
    ] = 1024
    data_queue_bytes: Annotated[
        int, Meta(description="Bytes that may be under way to one peer; further transfers wait.", ge=1)
    ] = 1 << 30
    data_frame_timeout: Annotated[
        float,
        Meta(
            description="Seconds in which a peer has read or sent a frame (16 MiB at most), else it is cut off.", gt=0
        ),
    ] = 60.0
    pool_bytes: Annotated[int, Meta(description="Memory for KV blocks.", ge=1 << 16)] = 1 << 30
    slab_bytes: Annotated[
        int,
        Meta(
            description="Memory for each namespace; 0: the first namespace gets the whole pool and others are refused.",
            ge=0,
        ),
    ] = 0
    namespace_idle: Annotated[
        float,
        Meta(description="Seconds without use after which a namespace may make way for another one.", ge=0, le=86400),
    ] = 60.0
    transports: Annotated[
        str,
        Meta(description="Which transports carry KV: prefer:A,B (in order) or require:A; of shm, rdma, tcp."),
    ] = "prefer:shm,tcp"
    topology_file: Annotated[
        str,
        Meta(
            description="YAML or JSON file with the preferred and secondary NICs of each memory location, instead of "
            'those found: {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}.'
        ),
    ] = ""
    rdma_devices: Annotated[
        str, Meta(description="RDMA devices to use, as in mlx5_0,mlx5_1; empty: all that the topology names.")
    ] = ""
    verify: Annotated[
        Literal["", "always", "sample", "off"],
        Meta(
            description="Check of fetched blocks on every transport; empty: as verify_tcp, verify_shm, verify_rdma say."
        ),
    ] = ""
    verify_tcp: Annotated[Verify, Meta(description="Check of blocks fetched over TCP.")] = "always"
    verify_shm: Annotated[Verify, Meta(description="Check of blocks fetched through shared memory.")] = "sample"
    verify_rdma: Annotated[Verify, Meta(description="Check of blocks fetched by RDMA.")] = "sample"
    verify_sample: Annotated[float, Meta(description="Share of the blocks that `sample` checks.", ge=0, le=1)] = 0.05
    lease_ttl: Annotated[
        float, Meta(description="Seconds that a remote reader's lease lasts from when it asked.", ge=0.05, le=8)
    ] = 4.0
    carry_bytes: Annotated[
        int,
        Meta(
            description="Blocks of so many bytes together come with the answer to who asks for them, where TCP carries "
            "them; 0: never.",
            ge=0,
            le=1 << 20,
        ),
    ] = 256 << 10
    outgoing_leases: Annotated[int, Meta(description="Remote readers served at one time.", ge=1)] = 256
    drain_timeout: Annotated[
        float,
        Meta(description="Seconds that a fenced writer has before its connections are destroyed.", ge=0.01, le=10),
    ] = 0.5
    growth_headroom: Annotated[
        float, Meta(description="Share of the slots that only running sequences may take.", ge=0, le=0.9)
    ] = 0.02
    prefetch_share: Annotated[float, Meta(description="Share of the slots that prefetch may take.", ge=0, le=1)] = 0.5
    tenant_quota_bytes: Annotated[
        int, Meta(description="Cache in DRAM for each tenant that `tenant_quotas` does not name; 0: no limit.", ge=0)
    ] = 0
    tenant_quota_ssd_bytes: Annotated[
        int | None,
        Meta(
            description="Cache on the SSD for each tenant of which `tenant_quotas` does not say it; 0: no limit; none: "
            "the part of it that its quota is of `pool_bytes`.",
            ge=0,
        ),
    ] = None
    tenant_quotas: Annotated[
        str,
        Meta(
            description="YAML file with the cache of each tenant: in DRAM, as in `acme: 20GiB`, or on both tiers, as "
            "in `acme: {dram: 20GiB, ssd: 1TiB}`; 0: no limit."
        ),
    ] = ""
    abort_after: Annotated[
        float,
        Meta(
            description="Seconds that a landing or a prefill waits for room before younger ones have to give way.",
            ge=0,
            le=60,
        ),
    ] = 1.0
    pin_share: Annotated[float, Meta(description="Share of the slots that hard pins may keep.", ge=0, le=0.9)] = 0.25
    low_watermark: Annotated[
        float, Meta(description="With a smaller share of free slots, blocks are evicted ahead of need.", ge=0, le=0.5)
    ] = 0.02
    high_watermark: Annotated[
        float, Meta(description="Eviction ahead of need stops at this share of free slots.", ge=0, le=0.9)
    ] = 0.04

    ssd_path: Annotated[
        str, Meta(description="Folder of the SSD tier, of this agent alone; empty: blocks that leave DRAM are gone.")
    ] = ""
    ssd_bytes: Annotated[int, Meta(description="Disk space of the SSD tier's blocks.", ge=0)] = 0
    ssd_ahead: Annotated[
        float,
        Meta(
            description="Share of the slots, 512 at most, that are free or written to the SSD ahead of need.",
            ge=0,
            le=1,
        ),
    ] = 0.125

    ssd_flush: Annotated[
        float,
        Meta(
            description="Seconds at the agent's end for writing to the SSD what DRAM alone holds; 0: it is lost.",
            ge=0,
            le=600,
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        if bool(self.ssd_path) != bool(self.ssd_bytes):
            raise ValueError("ssd_path and ssd_bytes must be set together")
        if len({bool(self.data_tls_cert), bool(self.data_tls_key), bool(self.data_tls_ca)}) > 1:
            raise ValueError("data_tls_cert, data_tls_key and data_tls_ca must be set together")
        if self.high_watermark < self.low_watermark:
            raise ValueError("high_watermark must not be below low_watermark")
        if not self.secret and not is_loopback(self.host):
            raise ValueError(f"secret must be set: whoever reaches {self.host} could read and write KV blocks")

    def verify_over(self, transport: str) -> Verify:
        """How blocks that came over ``transport`` are checked."""
        return self.verify or {"shm": self.verify_shm, "rdma": self.verify_rdma}.get(transport, self.verify_tcp)

    @property
    def devices(self) -> list[str]:
        return [name for part in self.rdma_devices.split(",") if (name := part.strip())]

    @property
    def checksums(self) -> bool:
        """Checksums are computed at commit unless every transport's check is off: then commits do not pay for them."""
        return {self.verify_over(transport) for transport in KNOWN} != {"off"}
