"""Contenders of ``make bench-store``: each in processes and an environment of its own, driven by JSON lines."""
