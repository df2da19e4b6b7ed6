"""A8 to A11 on a live mesh: every parameter acts as in a single process, through messages, engines and migration."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from services.conductor.gateway.choices import derived_seed

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh]
B = 32
COMPLETIONS = "/v1/completions"
Tokens = Callable[[int], list[int]]


@dataclass
class Choice:
    text: str = ""
    finish: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish
        if found := choice["logprobs"]:
            assert len({len(values) for values in found.values()}) == 1
            self.tokens += found["tokens"]
            self.logprobs += found["token_logprobs"]
            self.top += found["top_logprobs"]
            self.offsets += found["text_offset"]


@dataclass
class Completion:
    choices: list[Choice]
    usage: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]


async def complete(
    mesh: Mesh, prompt: Any, *, stream: bool, count: int = 1, begun: asyncio.Event | None = None, **options: Any
) -> Completion:
    """All choices; ``stream`` changes how they travel, not what is returned. ``begun`` is set at its 20th token."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 24, **options}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = Completion([Choice() for _ in range(count)], {})
    async with mesh.session() as session, session.post(mesh.url + COMPLETIONS, json=body) as response:
        data = b""
        async for chunk in response.content.iter_any():
            data += chunk
            if begun and data.count(b"data: ") >= 20:
                begun.set()
        raw = data.decode()
        assert response.status == 200, raw
    if stream:
        *events, done, end = raw.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert [bool(chunk["usage"]) for chunk in chunks] == [not chunk["choices"] for chunk in chunks]
    else:
        chunks = [json.loads(raw)]
        assert [choice["index"] for choice in chunks[0]["choices"]] == list(range(count))
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer.choices[choice["index"]].add(choice)
        answer.usage = chunk["usage"] or answer.usage
    return answer


@pytest.fixture
def mesh(unverified: Callable[[], Mesh]) -> Mesh:
    return unverified()


# -- one parameter at a time against the single process ----------------------------------------------------------------

FEW: dict[str, Any] = {"logit_bias": dict.fromkeys(range(60, 72), 100.0)}
"""Only a dozen tokens are ever drawn, so that they come again and penalties have something to do."""
HOT = FEW | {"temperature": 1.0, "seed": 11}
GREEDY_PARAMETERS: list[dict[str, Any]] = [
    FEW | {"presence_penalty": 2.0},
    FEW | {"frequency_penalty": 1.5},
    FEW | {"repetition_penalty": 3.0},
    {"logit_bias": FEW["logit_bias"] | dict.fromkeys(range(60, 66), -100.0)},
    {},
]
HOT_PARAMETERS: list[dict[str, Any]] = [
    HOT | {"seed": -5},
    HOT | {"min_p": 0.5},
    HOT | {"top_k": 2},
    HOT | {"top_p": 0.7},
    HOT | {"temperature": 0.3, "presence_penalty": 1.0, "frequency_penalty": -2.0, "repetition_penalty": 1.3},
]


def wire(options: dict[str, Any]) -> dict[str, Any]:
    """JSON has no numbers as keys."""
    bias = options.get("logit_bias", {})
    return options | {"logit_bias": {str(id): value for id, value in bias.items()}}


async def test_every_parameter_acts_as_in_a_single_process(mesh: Mesh, alone: Alone, tokens: Tokens) -> None:
    prompt = tokens(B + 7)
    every = [FEW, *GREEDY_PARAMETERS, HOT, *HOT_PARAMETERS]
    expected = await asyncio.to_thread(lambda: [alone(prompt, 40, **options) for options in every])
    assert len(set(expected)) == len(every), "each of them changes the answer"
    for stream in (False, True):
        answers = await asyncio.gather(
            *(complete(mesh, prompt, stream=stream, max_tokens=40, **wire(one)) for one in every)
        )
        assert [answer.texts[0] for answer in answers] == expected


async def test_stop_ids_and_min_tokens_act_as_in_a_single_process(
    mesh: Mesh, alone: Alone, tokens: Tokens, first_token: Callable[[Sequence[int]], int]
) -> None:
    prompt = tokens(B + 7)
    stop = first_token(prompt)
    for stream in (False, True):
        answer = await complete(mesh, prompt, stream=stream, stop_token_ids=[stop])
        assert (answer.texts, answer.choices[0].finish) == ([""], "stop")
        answer = await complete(mesh, prompt, stream=stream, stop_token_ids=[stop], min_tokens=9)
        assert answer.texts == [alone(prompt, 24, stop_ids=[stop], min_tokens=9)]
        assert answer.usage["completion_tokens"] > 9


# -- choices -----------------------------------------------------------------------------------------------------------


async def test_n_choices_take_one_prefill_and_have_seeds_of_their_own(mesh: Mesh, alone: Alone, tokens: Tokens) -> None:
    n, last, prompt, expected = 5, 9, list[int](), list[str]()
    hot: dict[str, Any] = {"temperature": 0.9, "seed": 42}
    for stream in (False, True):
        prompt = tokens(30 * B + last)
        expected = [alone(prompt, 24, **hot | {"seed": derived_seed(42, j)}) for j in range(n)]
        before = mesh.total("mooncake_prefill_tokens_total")
        answer = await complete(mesh, prompt, stream=stream, count=n, n=n, **hot)
        computed = mesh.total("mooncake_prefill_tokens_total") - before
        assert answer.texts == expected
        assert len(set(expected)) == n
        assert computed == len(prompt) + (n - 1) * last, "full blocks once, the rest for each choice"
        assert answer.usage["prompt_tokens"] == len(prompt)
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await complete(mesh, prompt, stream=False, **hot)).texts == expected[:1]
    assert await mesh.settled() == {}


async def test_choices_of_several_prompts_come_prompt_by_prompt(mesh: Mesh, alone: Alone, tokens: Tokens) -> None:
    prompts = [tokens(B + 3), tokens(5)]
    hot: dict[str, Any] = {"temperature": 0.9, "seed": 7}
    expected = [alone(p, 24, **hot | {"seed": derived_seed(7, j)}) for p in prompts for j in range(2)]
    for stream in (False, True):
        answer = await complete(mesh, prompts, stream=stream, count=4, n=2, best_of=2, **hot)
        assert answer.texts == expected
        assert answer.usage["prompt_tokens"] == sum(map(len, prompts))


# -- log-probabilities -------------------------------------------------------------------------------------------------


def plain_logprobs(folder: Path, prompt: Sequence[int], outputs: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of the unmodified library: a row over the vocabulary for each output."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *outputs]])).logits[0, len(prompt) - 1 : -1]
    rows: np.ndarray[Any, Any] = torch.log_softmax(logits.double(), -1).numpy()
    return rows


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_plain_model_from_the_first_token_on(
    mesh: Mesh, tiny: Path, tokens: Tokens, stream: bool
) -> None:
    from tokenizers import Tokenizer

    names = {bytes_name(data): id for id, data in enumerate(all_bytes(Tokenizer.from_file(f"{tiny}/tokenizer.json")))}
    prompt = tokens(2 * B + 5)
    answer = await complete(mesh, prompt, stream=stream, logprobs=5, temperature=0.8, seed=3, ignore_eos=True)
    [choice] = answer.choices
    ids = [names[token] for token in choice.tokens]
    assert len(ids) == answer.usage["completion_tokens"] == 24
    rows = await asyncio.to_thread(plain_logprobs, tiny, prompt, ids)
    np.testing.assert_allclose(choice.logprobs, rows[range(24), ids], atol=2e-4)
    for row, top, id in zip(rows, choice.top, ids, strict=True):
        assert {names[name] for name in top} - {id} == set(np.argsort(-row)[:5].tolist()) - {id}
        np.testing.assert_allclose(list(top.values()), row[[names[name] for name in top]], atol=2e-4)


def all_bytes(library: Any) -> list[bytes | None]:
    from services.conductor.gateway.pieces import Pieces

    special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    pieces = Pieces(library, frozenset(special))
    return [pieces.data(i) or pieces.name(i).encode() for i in range(library.get_vocab_size())]


def bytes_name(data: bytes | None) -> str:
    try:
        return (data or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data or b"")


async def test_logprobs_and_parameters_survive_a_migration(mesh: Mesh, alone: Alone, tokens: Tokens) -> None:
    """Decode is killed in the middle of all streams: they go on as those that were left alone. The last test: it leaves
    the mesh to be healed."""
    prompt, length = tokens(B + 7), 150
    every = [HOT, *GREEDY_PARAMETERS[:3], HOT_PARAMETERS[-1]]
    options = [wire(one) | {"logprobs": 2, "ignore_eos": True, "max_tokens": length} for one in every]
    calm = await asyncio.gather(*(complete(mesh, prompt, stream=True, **one) for one in options))
    migrated, drawn = mesh.cluster()["requests"]["migrated"], drawn_by(mesh)
    begun = [asyncio.Event() for _ in options]
    streams = [
        asyncio.create_task(complete(mesh, prompt, stream=True, begun=event, **one))
        for event, one in zip(begun, options, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    busiest = max(now := drawn_by(mesh), key=lambda id: now[id] - drawn[id])
    os.kill(mesh.pid("services.decode", busiest), signal.SIGKILL)
    for expected, answer in zip(calm, await asyncio.gather(*streams), strict=True):
        assert answer.texts == expected.texts
        assert answer.choices[0].tokens == expected.choices[0].tokens
        np.testing.assert_allclose(answer.choices[0].logprobs, expected.choices[0].logprobs, atol=2e-4)
        assert len(answer.choices[0].tokens) == length
    assert mesh.cluster()["requests"]["migrated"] > migrated


def drawn_by(mesh: Mesh) -> dict[str, float]:
    """Tokens that each decode instance has drawn."""
    pages = {process.removeprefix("decode "): page for process, page in mesh.scrapes().items() if "decode " in process}
    return {id: float(re.findall(r"^mooncake_decode_tokens_total (\S+)", page, re.M)[0]) for id, page in pages.items()}
