"""A streaming client that takes times: first token, every token, and what the answer says of itself."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Answer:
    """``ttft`` and ``times`` are seconds since the request was sent; ``text`` is the concatenated deltas."""

    ttft: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    error: str = ""

    @property
    def cached(self) -> int:
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens", 0))


async def complete(session: aiohttp.ClientSession, url: str, prompt: str | list[int], **options: Any) -> Answer:
    """One streamed text completion. Errors are recorded in the answer, not raised. ``name`` is its request id."""
    headers = {"x-request-id": options.pop("name")} if "name" in options else {}
    body = {"model": options.pop("model"), "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    answer, start = Answer(), time.perf_counter()
    async with session.post(url + "/v1/completions", json={**body, **options}, headers=headers) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = await response.text()
            return answer
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = str(event["error"])
                return answer
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                answer.times.append(time.perf_counter() - start)
                answer.ttft = answer.ttft or answer.times[-1]
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
    return answer
