"""An agent in a process of its own, driven by JSON lines on stdin: ``python -m tests.transfer.remote_agent
'{...}'``."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from services.store.transfer.base import Op, Peer
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.tls import Files, Tls
from shared.messages import Ref
from tests.transfer.agents import SECRET, Pool, codes, request


class RemoteAgent:
    def __init__(self, options: dict[str, Any]) -> None:
        self.peers: dict[str, Peer] = {}
        self.pool = Pool()
        self.engine = Engine(
            Ref(options["id"], options["incarnation"]),
            secret=SECRET,
            resolve=self.resolve,
            port=options["port"],
            policy=TransportPolicy.parse(options["policy"]),
            on_call=self.answer,
            tls=Tls(Files(**options["tls"])) if options["tls"] else None,
        )
        self.engine.register_local_memory(self.pool.view, name="pool", fd=self.pool.fd)

    async def resolve(self, id: str) -> Peer:
        return self.peers[id]

    async def answer(self, peer: Ref, payload: bytes) -> bytes:
        return peer.id.encode() + b" said " + payload

    async def do(self, order: dict[str, Any]) -> Any:
        if order["do"] == "peek":
            return self.pool[order["offset"] : order["offset"] + order["length"]].hex()
        if order["do"] == "fill":
            self.pool[order["offset"] : order["offset"] + order["length"]] = bytes([order["byte"]]) * order["length"]
            return True
        peer = Peer(Ref(*order["ref"]), *order["address"])
        self.peers[peer.ref.id] = peer
        wanted = [request(Op(op), peer.ref, *numbers) for op, *numbers in order["requests"]]
        return codes(await self.engine.transfer(wanted, order.get("timeout", 100.0)))


async def main() -> None:
    agent = RemoteAgent(json.loads(sys.argv[1]))
    await agent.engine.start()
    peer = agent.engine.peer()
    print(json.dumps({"host": peer.host, "port": peer.port, "host_id": peer.host_id, "shm": peer.shm}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await agent.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
