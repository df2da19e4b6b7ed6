"""What describes an attempt, and what is told of its failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.blocks import KEY, chain_keys, pack_tokens
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode
from shared.errors import InvalidInput, NoRoom
from shared.instance.job import Prompt, cause
from shared.instance.pool import PoolView
from shared.messages import Admission, Ref, Sampling


def admission_of(count: int, prompt: int | None = None, **changes: Any) -> Admission:
    tokens, root = np.arange(count, dtype=np.uint32), bytes(KEY)
    fields: dict[str, Any] = {
        "gateway": Ref("g", 1),
        "tokens": pack_tokens(tokens),
        "prompt_tokens": count if prompt is None else prompt,
        "root": root,
        "keys": chain_keys(root, tokens, 16),
        "sampling": Sampling(max_tokens=4, seed=1),
        "lists": 0,
    }
    return Admission(**fields | changes)


def test_prompt() -> None:
    prompt = Prompt(admission_of(40, 38), 16)
    assert (len(prompt), prompt.full, prompt.blocks, prompt.first) == (40, 2, 3, 2)
    assert prompt.parent(0) == prompt.root and prompt.parent(2) == prompt.keys[1]
    assert [prompt.finish(9, i, 1000) for i in (2, 3)] == ["", "length"]
    assert prompt.finish(9, 2, 41) == "length"


@pytest.mark.parametrize(
    ("admission", "field"),
    [
        (admission_of(0), "tokens"),
        (admission_of(10, 6), "max_tokens"),
        (admission_of(10, 12), "max_tokens"),
        (admission_of(40, keys=b""), "keys"),
        (admission_of(40, root=b""), "keys"),
        (admission_of(4, sampling=Sampling(max_tokens=4, seed=1, choices=2)), "choices"),
    ],
)
def test_prompts_that_make_no_sense(admission: Admission, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Prompt(admission, 16)
    assert caught.value.field == field


def test_cause_of_groups() -> None:
    group = ExceptionGroup("x", [ValueError("a"), ExceptionGroup("y", [NoRoom("full")])])
    assert isinstance(cause(group), NoRoom)
    assert cause(ValueError("a")).message == "ValueError: a"


def test_pool_view_copies_a_slot_only() -> None:
    node = MemoryNode(MemoryNetwork(), "n", MemoryEngine().geometry, 3)
    node.memory[0], node.memory[1], node.memory[2] = 1, 2, 3
    view = PoolView(node.pool)
    view.copy(2, 1)
    assert [int(node.memory[i].min()) for i in range(3)] == [1, 3, 3]
    assert int(node.memory[1].max()) == 3
