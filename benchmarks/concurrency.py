"""64 concurrent requests of mixed length on two prefill and two decode nodes, against a single process.

Texts must be equal (fp32, fixed seeds); the spread over the nodes is busiest/mean of the requests that each served.
Takes ``mooncake status --json`` in the middle. ``python -m benchmarks.concurrency OUT`` writes the evidence.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.client import Answer, complete
from benchmarks.processes import MOONCAKE, Mesh, mesh
from shared.messages import Sampling

REQUESTS = 64


def requests(seed: int = 64) -> list[dict[str, Any]]:
    """Prompts of 8 to 400 tokens, a third of them with a common beginning; greedy and sampled; 8 to 48 outputs."""
    rng = random.Random(seed)
    head = [rng.randrange(1000, 40_000) for _ in range(96)]
    out: list[dict[str, Any]] = []
    for n in range(REQUESTS):
        own = [rng.randrange(1000, 40_000) for _ in range(rng.choice((8, 31, 32, 33, 120, 400)))]
        temperature = 0.0 if n % 2 else 0.8
        out.append(
            {
                "prompt": head + own if n % 3 == 0 else own,
                "max_tokens": rng.randint(8, 48),
                "temperature": temperature,
                "seed": n,
            }
        )
    return out


def single_process(path: str, asked: list[dict[str, Any]]) -> list[str]:
    """The same requests, one after the other, in this process. Ids become text as in the gateway,
    which drops the bytes of a character that was cut off."""
    from services.conductor.gateway.tokenizer import Tokenizer
    from shared.engines.local import LocalRunner
    from shared.engines.transformers import TransformersEngine

    engine = TransformersEngine(path, threads=1)
    runner, tokenizer = LocalRunner(engine, slots=256), Tokenizer.load(Path(path))
    texts = []
    for one in asked:
        sampling = Sampling(
            max_tokens=one["max_tokens"],
            seed=one["seed"],
            temperature=one["temperature"],
            stop_ids=sorted(engine.eos_ids),
        )
        prompt = np.array(one["prompt"], dtype=np.uint32)
        detokenizer = tokenizer.detokenizer(prompt)
        text = "".join(detokenizer.feed(output.token) for output in runner.generate(prompt, sampling))
        texts.append(text + detokenizer.flush())
    return texts


async def ask_all(running: Mesh, model: str, asked: list[dict[str, Any]], status: dict[str, Any]) -> list[Answer]:
    """All at once; in the middle the status as the command prints it."""

    async def look() -> None:
        await asyncio.sleep(4)
        command = [str(MOONCAKE), "status", "--json", "--url", running.url]
        child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await child.communicate()
        status.update(json.loads(out))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900)) as session:
        looking = asyncio.create_task(look())
        answers = await asyncio.gather(*(complete(session, running.url, model=model, **one) for one in asked))
        await looking
    return list(answers)


def spread(cluster: dict[str, Any]) -> dict[str, float]:
    """Busiest / mean of served requests, by role."""
    out = {}
    for role in ("prefill", "decode"):
        served = [i["served"] for i in cluster["instances"] if i["role"] == role]
        out[role] = max(served) / (sum(served) / len(served))
    return out


def main(model: str, path: str, out: Path) -> None:
    asked, status = requests(), dict[str, Any]()
    flags = (
        "--prefill",
        "2",
        "--decode",
        "2",
        "--pool-bytes",
        "2GiB",
        "--slo-ttft-ms",
        "600000",
        "--slo-tbt-ms",
        "60000",
    )
    with mesh(*flags) as running:
        start = time.perf_counter()
        answers = asyncio.run(ask_all(running, model, asked, status))
        seconds = time.perf_counter() - start
        cluster = running.get("/cluster")
    expected = single_process(path, asked)
    equal = sum(a.text == e for a, e in zip(answers, expected, strict=True))
    report = {
        "requests": REQUESTS,
        "errors": [a.error for a in answers if a.error],
        "equal_texts": equal,
        "seconds": round(seconds, 1),
        "busiest_over_mean": spread(cluster),
        "cached_tokens": sum(a.cached for a in answers),
        "differing": [n for n, (a, e) in enumerate(zip(answers, expected, strict=True)) if a.text != e],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "concurrency.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "status-during-load.json").write_text(json.dumps(status, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    from shared.model import resolve_model, served_name

    folder = resolve_model()
    main(served_name(str(folder)), str(folder), Path(sys.argv[1]))
