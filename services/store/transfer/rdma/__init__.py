"""Transport over RDMA verbs."""
