"""A decode instance as a process."""

from __future__ import annotations

from services.decode.service import Decode
from services.decode.settings import DecodeSettings
from services.store.client import StoreClient
from shared.config import load
from shared.instance.host import Parts
from shared.instance.process import run
from shared.records import DECODE


def main() -> None:
    settings = load(DecodeSettings)

    def build(parts: Parts) -> Decode:
        return Decode(parts.ref, parts.bus, parts.store, parts.engine, parts.compute, settings)

    run(DECODE, settings, StoreClient.connect, build)
