"""Prompt queue, chunked prefill and streaming of KV to the decode node."""
