"""The node's KV pool: slots, leases, eviction and the transfer engine."""
