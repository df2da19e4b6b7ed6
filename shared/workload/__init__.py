"""Workloads: the paper's traces and generators of the same kind, for the load generator and for the simulator. Pure."""
