"""Greedy text in fp32 equals that of the library's own ``generate``, however the work is cut up and shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from shared.blocks import Tokens
from shared.engines.base import Draw, PoolMap, Work
from shared.engines.local import LocalRunner
from shared.engines.pool import KVPool
from shared.engines.private_pool import anonymous_pool
from shared.engines.transformers import TransformersEngine
from shared.messages import Sampling

B = 16
COUNT = 12
LENGTHS = [1, 5, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1, 7 * B + 3]
Prompts = Callable[..., Tokens]
Reference = Callable[[str, Tokens, int], list[int]]


def greedy(count: int = COUNT) -> Sampling:
    return Sampling(max_tokens=count, seed=0, temperature=0.0)


def family(engine: TransformersEngine) -> str:
    return engine.info.model_type


def prefill(
    engine: TransformersEngine, prompt: Tokens, slots: Sequence[int], start: int = 0, chunk: int = 1 << 20
) -> int:
    """Compute the prompt from ``start`` on and draw the first token."""
    drawn = None
    for at in range(start, len(prompt), chunk):
        last = at + chunk >= len(prompt)
        work = Work(prompt[at : at + chunk], at, slots, Draw(greedy(), 0) if last else None)
        [drawn] = engine.step([work])
        assert (drawn is None) != last
    assert drawn is not None
    return drawn.token


def decode(engine: TransformersEngine, first: int, at: int, slots: Sequence[int], count: int = COUNT) -> list[int]:
    """Outputs from ``first`` on, which is drawn but not computed."""
    outputs = [first]
    while len(outputs) < count:
        tokens = np.array(outputs[-1:], dtype=np.uint32)
        [drawn] = engine.step([Work(tokens, at + len(outputs) - 1, slots, Draw(greedy(), len(outputs)))])
        assert drawn is not None
        outputs.append(drawn.token)
    return outputs


@pytest.mark.parametrize("chunk", [B, 24, 1 << 20])
def test_equals_generate_at_block_boundaries_batched_and_chunked(
    engine: TransformersEngine, prompts: Prompts, reference: Reference, chunk: int
) -> None:
    requests = [prompts(length) for length in LENGTHS]
    expected = [reference(family(engine), prompt, COUNT) for prompt in requests]
    assert np.mean([len(set(tokens)) for tokens in expected]) > COUNT / 2, "a model that repeats itself proves nothing"
    with LocalRunner(engine, slots=128, chunk=chunk, max_batch=4) as runner:
        results = runner.generate_many([(prompt, greedy()) for prompt in requests])
    assert [[output.token for output in outputs] for outputs in results] == expected


def test_equals_generate_alone(bound: TransformersEngine, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts(3 * B + 5)
    tokens = decode(bound, prefill(bound, prompt, range(8), chunk=7), len(prompt), range(8))
    assert tokens == reference(family(bound), prompt, COUNT)


@pytest.mark.parametrize("length", [4 * B - 1, 4 * B, 4 * B + 1])
def test_shared_prefix_is_read_in_place(
    bound: TransformersEngine, prompts: Prompts, reference: Reference, length: int
) -> None:
    """Two prompts share three blocks: the second reads them in the first one's slots, in another order of slots."""
    first = prompts(length)
    second = np.concatenate([first[: 3 * B], prompts(B + 3, 7)])
    own = [9, 4, 17, 2, 30, 31]
    assert prefill(bound, first, own) == reference(family(bound), first, 1)[0]
    shared = [*own[:3], 40, 22, 50]
    start = prefill(bound, second, shared, start=3 * B)
    assert decode(bound, start, len(second), shared) == reference(family(bound), second, COUNT)


def test_a_wrong_block_changes_the_text(bound: TransformersEngine, prompts: Prompts) -> None:
    """The control of all tests here: the model is sensitive to what is in the pool."""
    prompt, slots = prompts(2 * B + 3), range(8)
    first = prefill(bound, prompt, slots)
    expected = decode(bound, first, len(prompt), slots)
    pool = bound._pool
    assert pool is not None
    for layer in range(bound.layers):
        pool._layers[layer][1] = 0
    assert decode(bound, first, len(prompt), slots) != expected


@pytest.mark.parametrize("blocks", [1, 4])
def test_fully_cached_prompt_computes_its_last_token_in_a_private_slot(
    bound: TransformersEngine, prompts: Prompts, reference: Reference, blocks: int
) -> None:
    prompt = prompts(blocks * B)
    slots = list(range(blocks))
    prefill(bound, prompt, slots)
    pool = bound._pool
    assert pool is not None
    before = pool.gather(0, torch.tensor(slots)).clone()
    # rule: committed blocks are never written again; the private slot starts as a copy of the last one
    layers = [pool.gather(layer, torch.tensor([blocks - 1])).clone() for layer in range(bound.layers)]
    private = 100
    for layer, kv in enumerate(layers):
        pool.write(layer, torch.full((B,), private), torch.arange(B), kv[:, 0], kv[:, 1])
    own = [*slots[:-1], private, 101]
    token = prefill(bound, prompt, own, start=len(prompt) - 1)
    assert torch.equal(before, pool.gather(0, torch.tensor(slots)))
    assert decode(bound, token, len(prompt), own) == reference(family(bound), prompt, COUNT)


def test_mixed_step_of_chunks_and_rows(bound: TransformersEngine, prompts: Prompts, reference: Reference) -> None:
    """One step decodes two sequences of very different length, prefills two others and continues a chunk."""
    near, far, fresh, cut = prompts(5), prompts(20 * B + 3), prompts(2 * B), prompts(3 * B + 2)
    tables = {0: range(2), 1: range(2, 26), 2: range(30, 34), 3: range(40, 46)}
    one, two = prefill(bound, near, tables[0]), prefill(bound, far, tables[1])
    bound.step([Work(cut[:B], 0, tables[3])])
    drawn = bound.step(
        [
            Work(fresh, 0, tables[2], Draw(greedy(), 0)),
            Work(np.array([one], np.uint32), len(near), tables[0], Draw(greedy(), 1)),
            Work(cut[B : 2 * B], B, tables[3]),
            Work(np.array([two], np.uint32), len(far), tables[1], Draw(greedy(), 1)),
            Work(prompts(1), 0, [60], Draw(greedy(), 0)),
        ]
    )
    tokens = [None if entry is None else entry.token for entry in drawn]
    assert [one, tokens[1]] == reference(family(bound), near, 2)
    assert [two, tokens[3]] == reference(family(bound), far, 2)
    assert [tokens[0]] == reference(family(bound), fresh, 1)
    assert tokens[2] is None
    assert [tokens[4]] == reference(family(bound), prompts(1), 1)
    assert prefill(bound, cut, tables[3], start=2 * B) == reference(family(bound), cut, 1)[0]


def test_garbage_in_unused_parts_of_blocks_changes_nothing(
    bound: TransformersEngine, prompts: Prompts, reference: Reference
) -> None:
    """Slots are given out with whatever is in them: another's keys, or bytes that are no number at all."""
    pool = bound._pool
    assert pool is not None
    for layer in range(bound.layers):
        pool._layers[layer].fill_(float("nan"))
    requests = [prompts(3), prompts(2 * B + 1), prompts(9 * B)]
    tables = [range(i * 12, i * 12 + 12) for i in range(3)]
    outputs = [[prefill(bound, p, t)] for p, t in zip(requests, tables, strict=True)]
    for index in range(1, COUNT):
        works = [
            Work(np.array(o[-1:], np.uint32), len(p) + index - 1, t, Draw(greedy(), index))
            for p, t, o in zip(requests, tables, outputs, strict=True)
        ]
        for tokens, drawn in zip(outputs, bound.step(works), strict=True):
            assert drawn is not None
            tokens.append(drawn.token)
    assert outputs == [reference(family(bound), prompt, COUNT) for prompt in requests]


def test_prefill_in_one_engine_decode_in_another_over_moved_blocks(
    llama: TransformersEngine,
    tiny: Callable[..., object],
    prompts: Prompts,
    reference: Reference,
    tmp_path: object,
) -> None:
    """What the mesh does: two pools of different place and stride, block bytes copied slot by slot between them."""
    other = TransformersEngine(str(tiny("llama")), block_size=B)
    prompt, geometry = prompts(4 * B + 5), llama.namespace.geometry
    fd = os.memfd_create("pools")
    step = geometry.slot_bytes + 4096
    os.ftruncate(fd, 64 * step + 8192)
    source = PoolMap(f"/proc/self/fd/{fd}", 0, geometry.slot_bytes, 16, geometry)
    target = PoolMap(f"/proc/self/fd/{fd}", 8192 + 32 * geometry.slot_bytes, step, 12, geometry)
    llama.bind(source)
    other.bind(target)
    here, there = [3, 1, 7, 0, 9, 5], [11, 0, 5, 2, 7, 1]
    first = prefill(llama, prompt, here)
    for a, b in zip(here, there, strict=True):
        block = os.pread(fd, geometry.slot_bytes, source.offset + a * source.stride)
        os.pwrite(fd, block, target.offset + b * target.stride)
    os.close(fd)
    assert decode(other, first, len(prompt), there) == reference("llama", prompt, COUNT)


def test_hook_sees_each_layer_complete_and_later_ones_untouched(llama: TransformersEngine, prompts: Prompts) -> None:
    geometry, prompt = llama.namespace.geometry, prompts(2 * B + 3)
    with anonymous_pool(geometry, 4) as pool:
        llama.bind(pool)
        view = KVPool.mapped(pool)
        seen: list[tuple[int, list[bool]]] = []

        def hook(layer: int) -> None:
            tokens = len(prompt)
            used = [bool((view.gather(i, torch.arange(3))[:tokens] != 0).all()) for i in range(geometry.layers)]
            seen.append((layer, used))

        llama.step([Work(prompt, 0, range(3))], hook)
    assert seen == [(i, [at <= i for at in range(geometry.layers)]) for i in range(geometry.layers)]


def test_kv_does_not_depend_on_what_follows(bound: TransformersEngine, prompts: Prompts) -> None:
    prompt = prompts(6 * B)
    prefill(bound, prompt[: 2 * B], range(2))
    prefill(bound, prompt, range(10, 16))
    pool = bound._pool
    assert pool is not None
    for layer in range(bound.layers):
        alone, longer = pool.gather(layer, torch.arange(2)).clone(), pool.gather(layer, torch.arange(10, 12))
        torch.testing.assert_close(alone, longer, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_bf16_differs_only_where_the_best_two_are_a_step_apart(
    load: Callable[..., TransformersEngine], model: Callable[..., object], prompts: Prompts, name: str
) -> None:
    """The margin rule: the drawn token's logit in the library's own bf16 pass is within one bf16 step of its best."""
    engine = load(name, "bfloat16")
    plain = model(name, "bfloat16")
    for length in (B - 1, 3 * B, 5 * B + 2):
        prompt = prompts(length)
        with LocalRunner(engine, slots=16, chunk=24) as runner:
            tokens = [output.token for output in runner.generate(prompt, greedy())]
        whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        with torch.inference_mode():
            logits = plain(whole, use_cache=False).logits[0].float()  # type: ignore[operator]
        for index, token in enumerate(tokens):
            row = logits[length - 1 + index]
            best = float(row.max())
            assert best - float(row[token]) <= 4 * 2.0 ** (np.floor(np.log2(abs(best))) - 7)
