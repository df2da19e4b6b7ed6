"""What the RDMA transport counts. ``nic`` is a device's name: there are as many as the machine has."""

from __future__ import annotations

from shared.telemetry import counter, gauge, held_gauge

NIC_BYTES = counter("transfer_rdma_bytes", "Bytes moved by this agent's work requests on a NIC.", ("nic", "op"))
NIC_ERRORS = counter("transfer_rdma_errors", "Work requests that broke their queue pair.", ("nic", "status"))
NIC_ACTIVE = gauge("transfer_rdma_nic_active", "1 while the NIC's port is up.", ("nic",))
NIC_RESTING = gauge("transfer_rdma_nic_resting", "1 while the NIC rests after failures.", ("nic",))
NIC_PAIRS = gauge("transfer_rdma_nic_queue_pairs", "Queue pairs on the NIC, of both directions.", ("nic",))
NIC_QUEUED = gauge("transfer_rdma_nic_queued_bytes", "Bytes of work requests on the NIC, or waiting for it.", ("nic",))
REGISTERED = held_gauge("rdma_registered_bytes")
PAIRS = held_gauge("rdma_queue_pairs")
