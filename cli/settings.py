"""Settings of ``mooncake up``: what people choose about a mesh on one machine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import CommonSettings

Policy = Literal["paper", "global_cache", "local_cache", "least_loaded", "round_robin", "random"]


class UpSettings(CommonSettings, frozen=True, kw_only=True):
    """A whole mesh on this machine. What is left out here is set with --config or MOONCAKE_* variables, which reach
    every service; what the file says in the section of a service comes before the defaults below."""

    model: Annotated[
        str, Meta(description="A model folder in Hugging Face's layout, or a hub id; empty: the default model.")
    ] = ""
    prefill: Annotated[int, Meta(description="Number of prefill instances.", ge=1, le=64)] = 1
    decode: Annotated[int, Meta(description="Number of decode instances.", ge=1, le=64)] = 1
    conductors: Annotated[
        int, Meta(description="Number of conductors; they share the port, any of them serves any request.", ge=1, le=16)
    ] = 1
    host: Annotated[str, Meta(description="Address that serves the HTTP API.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port that serves the HTTP API; 0 picks a free one.", ge=0, le=65535)] = 8000
    nats: Annotated[str, Meta(description="URL of a NATS server to use; empty: start one.")] = ""
    redis: Annotated[str, Meta(description="URL of a Redis server to use; empty: start one.")] = ""
    engine: Annotated[
        Literal["transformers", "simulated"],
        Meta(description="Engine of the instances; `simulated` takes the time of a model and answers with words."),
    ] = "transformers"
    context_length: Annotated[
        int, Meta(description="Context of the engine `simulated`; 0: the model's own.", ge=0, le=1 << 24)
    ] = 0
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"],
        Meta(description="Type of weights and KVCache."),
    ] = "float32"
    threads: Annotated[int, Meta(description="Compute threads of each instance.", ge=1, le=1024)] = 1
    block_size: Annotated[int, Meta(description="Tokens per KV block.", ge=16, le=512)] = 32
    latency_model: Annotated[
        str,
        Meta(
            description="File of `mooncake calibrate`, which spares instances to measure themselves; with the engine "
            "`simulated`, the time that it takes."
        ),
    ] = ""
    pool_bytes: Annotated[int, Meta(description="DRAM pool of each node's store.", ge=1 << 20)] = 512 << 20
    ssd_path: Annotated[
        str, Meta(description="Folder for SSD tiers, one in it for each node's store; empty: DRAM alone.")
    ] = ""
    ssd_bytes: Annotated[int, Meta(description="Disk space of each node's SSD tier.", ge=1 << 20)] = 8 << 30
    policy: Annotated[Policy | None, Meta(description="How requests are placed; none: the conductor's default.")] = None
    transport: Annotated[
        Literal["auto", "shm", "tcp", "rdma"],
        Meta(description="How KV bytes travel between nodes; `auto`: shared memory, else TCP."),
    ] = "auto"
    verify: Annotated[
        Literal["auto", "always", "sample", "off"],
        Meta(description="Which fetched blocks are checked against their checksum; `auto`: by transport."),
    ] = "auto"
    data_tls: Annotated[
        bool,
        Meta(description="TLS between the stores of nodes, with a certificate that openssl makes for this run."),
    ] = False
    data_tls_cert: Annotated[
        str, Meta(description="PEM file of the certificate that all stores show: TLS with files of one's own.")
    ] = ""
    data_tls_key: Annotated[str, Meta(description="PEM file of the certificate's key.")] = ""
    data_tls_ca: Annotated[str, Meta(description="PEM file of the authorities whose certificates stores accept.")] = ""
    slo_ttft_ms: Annotated[
        int, Meta(description="Objective for the time to the first token; generous, since a laptop is slow.", ge=1)
    ] = 120_000
    slo_tbt_ms: Annotated[
        int, Meta(description="Objective for the time between tokens; generous, since a laptop is busy.", ge=1)
    ] = 5_000
    api_keys: Annotated[str, Meta(description="File of API keys and their tenants; empty: no key is asked for.")] = ""
    ready_timeout: Annotated[float, Meta(description="Seconds to wait for the mesh to be ready.", gt=0)] = 300.0
    json: Annotated[bool, Meta(description="Print the ready line as one JSON document on stdout.")] = False

    def __post_init__(self) -> None:
        if len({bool(path) for path in self.tls_files.values()}) > 1:
            raise ValueError("data_tls_cert, data_tls_key and data_tls_ca must be set together")

    @property
    def tls_files(self) -> dict[str, str]:
        """Paths by the names that they have in a store's settings; empty ones where none are named."""
        return {
            "data_tls_cert": self.data_tls_cert,
            "data_tls_key": self.data_tls_key,
            "data_tls_ca": self.data_tls_ca,
        }
