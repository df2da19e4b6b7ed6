"""Addresses of servers as people may see them."""

from __future__ import annotations


def shown(urls: str) -> str:
    """``urls``, several with commas, each without its user and password (and then without its scheme)."""
    return ", ".join(url.strip().rpartition("@")[2] for url in urls.split(","))
