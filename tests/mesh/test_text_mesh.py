"""A4, A8, A9, A10 on a live mesh, over a model whose answers are known: each token has one successor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh]

NAME = "parrot"
CHAT = [{"role": "user", "content": "Say it."}]
PARTS = ("a", "aa", "b", "aaa", "c", " the", " 🗼", "日本", "語", " é", " STOP", "PING", "e\u0301", "한", " end")
SIDES = [False, True]


@pytest.fixture(scope="session")
def chain(tiny: Path) -> list[int]:
    """Tokens in the order in which the model says them, each once; characters of several tokens among them. The first
    is what a chat's prompt ends with."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = library.encode("<|im_start|>assistant\n", add_special_tokens=False).ids[-1:]
    for part in PARTS:
        fresh = library.encode(part, add_special_tokens=False).ids
        if not set(fresh) & set(ids) and len(set(fresh)) == len(fresh):
            ids += fresh
    return ids


@pytest.fixture(scope="session")
def text(tiny: Path, chain: list[int]) -> str:
    """What the model says after the first token of ``chain``, up to its end."""
    from tokenizers import Tokenizer

    found = str(Tokenizer.from_file(str(tiny / "tokenizer.json")).decode(chain[1:]))
    assert "\ufffd" not in found
    return found


@pytest.fixture(scope="session")
def eos(tiny: Path) -> int:
    return int(json.loads((tiny / "config.json").read_text())["eos_token_id"])


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory, chain: list[int], eos: int) -> Path:
    """The tiny model with all that mixes positions taken out: logits are those of the last token's successor."""
    import torch
    from transformers import AutoModelForCausalLM

    from shared.engines.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("models") / NAME, layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    cycle = torch.tensor([*chain, eos])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        states = torch.nn.functional.normalize(torch.randn(len(cycle), 32, generator=torch.Generator().manual_seed(1)))
        model.model.embed_tokens.weight[cycle] = states
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[cycle.roll(-1)] = 2 * states
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def mesh(up: Callable[..., Mesh], parrot: Path) -> Mesh:
    return up("--model", str(parrot), "--prefill", "1", "--decode", "1")


class Said:
    """The answer of either endpoint: of a stream its chunks, else the one object."""

    def __init__(self, chunks: list[dict[str, Any]]) -> None:
        self.chunks = chunks
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        self.deltas = [self._text(choice) for choice in choices]
        self.text = "".join(self.deltas)
        [self.finish] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        self.usage = chunks[-1]["usage"]
        self.logprobs = [(choice["logprobs"] or {}).get("content") or [] for choice in choices]

    @staticmethod
    def _text(choice: dict[str, Any]) -> str:
        if "text" in choice:
            return str(choice["text"])
        return str((choice.get("message") or choice["delta"]).get("content", ""))

    @property
    def data(self) -> bytes:
        """The bytes of all tokens that are listed."""
        return b"".join(bytes(entry["bytes"]) for entries in self.logprobs for entry in entries if entry["bytes"])


async def say(mesh: Mesh, prompt: Any, *, stream: bool, **options: Any) -> Said:
    """``prompt``: of a completion, or the messages of a chat."""
    body: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 200, **options}
    chat = prompt is CHAT
    body |= {"messages" if chat else "prompt": prompt}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    url = mesh.url + ("/v1/chat/completions" if chat else "/v1/completions")
    async with mesh.session() as session, session.post(url, json=body) as response:
        raw = (await response.read()).decode()
        assert response.status == 200, raw
    if not stream:
        return Said([json.loads(raw)])
    *events, done, end = raw.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return Said([json.loads(event.removeprefix("data: ")) for event in events])


def cut_by_hand(text: str, stops: Sequence[str]) -> str:
    """The definition: the first end of any stop string; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - len(max(found, key=len))]
    return text


def prompts(chain: list[int]) -> tuple[Any, Any]:
    return chain[:1], CHAT


@pytest.mark.parametrize("stream", SIDES)
async def test_a9_characters_split_over_tokens(mesh: Mesh, chain: list[int], text: str, stream: bool) -> None:
    for prompt in prompts(chain):
        said = await say(mesh, prompt, stream=stream)
        assert (said.text, said.finish) == (text, "stop")
        assert said.usage["completion_tokens"] == len(chain), "the end counts, what the prompt ended with does not"
        assert not any("\ufffd" in delta for delta in said.deltas)


@pytest.mark.parametrize("stream", SIDES)
async def test_a9_an_answer_that_ends_inside_a_character(mesh: Mesh, chain: list[int], text: str, stream: bool) -> None:
    said = await asyncio.gather(*(say(mesh, chain[:1], stream=stream, max_tokens=n) for n in range(1, len(chain))))
    for one in said:
        assert text.startswith(one.text)
        assert one.finish == "length"
    assert said[-1].text == text


STOPS: list[list[str]] = [
    ["aab"],
    ["aaac"],  # overlaps its own prefix
    ["aabaaac"],
    ["STOPPING", "TOPP", "nowhere"],
    ["a\u0301", "🗼"],
    ["the 🗼"],
    ["語", "é ST"],
    ["STOP", "OP"],
    ["PING e"],
    ["a"],
    ["nothing of the kind"],
]


@pytest.mark.parametrize("stream", SIDES)
async def test_a8_stop_strings(mesh: Mesh, chain: list[int], text: str, stream: bool) -> None:
    for stops in STOPS:
        expected = cut_by_hand(text, stops)
        for prompt in prompts(chain):
            said = await say(mesh, prompt, stream=stream, stop=stops)
            assert (said.text, said.finish) == (expected, "stop"), stops
    assert await mesh.settled() == {}


@pytest.mark.parametrize("stream", SIDES)
async def test_a8_a_stop_string_ends_what_would_not_end(mesh: Mesh, chain: list[int], text: str, stream: bool) -> None:
    """The instances stop at once, not at ``max_tokens``."""
    drawn = mesh.total("mooncake_decode_tokens_total")
    said = await say(mesh, chain[:1], stream=stream, stop=["\naa"], ignore_eos=True, max_tokens=3000)
    assert (said.text, said.finish) == (text, "stop")
    assert await mesh.settled() == {}
    assert mesh.total("mooncake_decode_tokens_total") - drawn < 1500


@pytest.mark.parametrize("stream", SIDES)
async def test_a4_the_first_token_ends_the_answer(mesh: Mesh, chain: list[int], stream: bool) -> None:
    for prompt, options in ((chain, {}), (chain[:1], {"stop_token_ids": chain[1:2]})):
        said = await asyncio.wait_for(say(mesh, prompt, stream=stream, **options), 100)
        assert (said.text, said.finish, said.usage["completion_tokens"]) == ("", "stop", 1)
    assert await mesh.settled() == {}


async def test_min_tokens_and_ignore_eos_go_on_behind_the_end(mesh: Mesh, chain: list[int], text: str) -> None:
    for stream in SIDES:
        said = await say(mesh, chain, stream=stream, min_tokens=7)
        assert said.usage["completion_tokens"] > 7
        said = await say(mesh, chain[:1], stream=stream, ignore_eos=True, max_tokens=len(chain) + 3)
        assert (said.text[: len(text) + 1], said.finish) == (text + "\n", "length")


async def test_a10_usage_is_one_last_chunk_without_choices(mesh: Mesh, chain: list[int]) -> None:
    for prompt in prompts(chain):
        *others, last = (await say(mesh, prompt, stream=True)).chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(chain)
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)


@pytest.mark.parametrize("stream", SIDES)
async def test_a11_logprobs_are_of_the_text_that_is_delivered(
    mesh: Mesh, chain: list[int], text: str, stream: bool
) -> None:
    said = await say(mesh, CHAT, stream=stream, logprobs=True, top_logprobs=2)
    assert said.data.decode() == text
    entries = [entry for part in said.logprobs for entry in part]
    assert len(entries) == len(chain) - 1 == said.usage["completion_tokens"] - 1
    for entry in entries:
        best, other = entry["top_logprobs"]
        assert {name: best[name] for name in ("token", "logprob", "bytes")} == {
            name: entry[name] for name in ("token", "logprob", "bytes")
        }
        assert other["logprob"] < best["logprob"] < 0
    for stops in STOPS:
        said = await say(mesh, CHAT, stream=stream, logprobs=True, stop=stops)
        cut = cut_by_hand(text, stops)
        assert said.text == cut
        assert cut.encode().startswith(said.data), "nothing of a stop string"
        told = b""
        for at, part in enumerate(said.logprobs):
            told += b"".join(bytes(entry["bytes"]) for entry in part)
            assert "".join(said.deltas[: at + 1]).encode().startswith(told), "no token before its text"


@pytest.mark.parametrize("stream", SIDES)
async def test_a11_echo(mesh: Mesh, chain: list[int], text: str, stream: bool) -> None:
    """The prompt comes first, as it was sent or as what its token ids say."""
    for prompt, whole in ((chain[:1], "\n" + text), (chain[:7], "\n" + text), ("x\n", "x\n" + text)):
        said = await say(mesh, prompt, stream=stream, echo=True)
        assert (said.text, said.finish) == (whole, "stop")
