"""Block identity: equal inputs share, anything else never does (D1), in any process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import KEY, Namespace, chain_keys, iter_keys, key_count, pack_tokens, split_keys, unpack_tokens

BASE = Namespace(
    model="m", weights="w", tokenizer="t", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_size=16
)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def reference_chain(root: bytes, tokens: list[int], block: int) -> list[bytes]:
    keys: list[bytes] = []
    for at in range(0, len(tokens) // block * block, block):
        ids = b"".join(t.to_bytes(4, "little") for t in tokens[at : at + block])
        root = hashlib.sha256(root + ids).digest()[:KEY]
        keys.append(root)
    return keys


@given(token_lists, st.sampled_from([1, 2, 16, 32]))
def test_chain_is_the_published_formula(tokens: list[int], block: int) -> None:
    chain = chain_keys(b"r" * KEY, np.array(tokens, dtype=np.uint32), block)
    assert split_keys(chain) == reference_chain(b"r" * KEY, tokens, block) == list(iter_keys(chain))
    assert key_count(chain) == len(tokens) // block


@given(token_lists, st.integers(0, 6))
def test_chain_continues_from_any_key(tokens: list[int], cut: int) -> None:
    ids = np.array(tokens, dtype=np.uint32)
    whole = chain_keys(BASE.root(), ids, 16)
    cut = min(cut, key_count(whole))
    parent = whole[(cut - 1) * KEY : cut * KEY] if cut else BASE.root()
    assert whole[: cut * KEY] + chain_keys(parent, ids[cut * 16 :], 16) == whole


@given(token_lists)
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens


OTHER = {str: "other", int: 7}


@pytest.mark.parametrize("name", list(Namespace.__struct_fields__))
def test_d1_every_namespace_field_separates(name: str) -> None:
    value = getattr(BASE, name)
    changed = msgspec.structs.replace(BASE, **{name: OTHER[type(value)]})
    assert changed.root() != BASE.root()
    assert BASE.difference(changed) == name
    assert BASE.difference(BASE) == ""
    if name not in ("lora", "salt"):
        assert changed.proof() != BASE.proof()
    else:
        assert changed.deployment() == BASE.deployment()


def test_d1_same_namespace_shares_across_processes_whatever_the_hash_seed() -> None:
    code = (
        "from shared.blocks import *; import numpy as np, sys;"
        "n=Namespace(model='m',weights='w',tokenizer='t',dtype='float32',layers=2,kv_heads=1,head_dim=4,block_size=16);"
        "sys.stdout.write((n.root()+chain_keys(n.root(),np.arange(64,dtype=np.uint32),16)+n.proof()).hex())"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    expected = BASE.root() + chain_keys(BASE.root(), np.arange(64, dtype=np.uint32), 16) + BASE.proof()
    assert outs == {expected.hex()}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_geometry_of_the_default_model(dtype: str, size: int) -> None:
    geometry = msgspec.structs.replace(BASE, layers=30, kv_heads=3, head_dim=64, block_size=32, dtype=dtype).geometry
    assert geometry.token_bytes * geometry.layers == 2 * 3 * 64 * 30 * size  # 46,080 B a token in fp32
    assert geometry.slot_bytes == geometry.layers * geometry.layer_bytes == 32 * 2 * 3 * 64 * 30 * size
    opaque = msgspec.structs.replace(BASE, layout="vllm-cpu", block_bytes=12345)
    assert opaque.geometry.slot_bytes == 12345
    assert [geometry.blocks(n) for n in (0, 1, 31, 32, 33)] == [0, 1, 1, 1, 2]
