"""Benchmarks: contenders interleaved in one run, equal threads, rows in ``benchmarks/results/*.json``."""
