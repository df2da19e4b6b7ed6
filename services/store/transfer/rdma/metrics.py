"""What the RDMA transport counts. ``nic`` is a device's name: there are as many as the machine has."""

from __future__ import annotations

from shared.telemetry import counter, gauge, held_gauge

NIC_BYTES = counter("transfer_rdma_bytes", "Bytes moved by this agent's work requests on a NIC.", ("nic", "op"))
NIC_ERRORS = counter("transfer_rdma_errors", "Work requests that broke their queue pair.", ("nic", "status"))
NIC_ACTIVE = gauge("transfer_rdma_nic_active", "1 while the NIC's port is up.", ("nic",))
REGISTERED = held_gauge("rdma_registered_bytes")
PAIRS = held_gauge("rdma_queue_pairs")
