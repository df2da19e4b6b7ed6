"""Packed weights compute what plain ones do, and are used only where they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shared.engines.transformers
from shared.engines.packed import PackedLinear, pack
from shared.engines.tiny import Family
from shared.engines.transformers import TransformersEngine

needs_mkl = pytest.mark.skipif(not pack(nn.Sequential(nn.Linear(8, 8))), reason="this torch has no packed products")


@needs_mkl
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 33, 512, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layer_gives_what_the_plain_one_gives(rows: int, bias: bool) -> None:
    plain = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(1, rows, 24)
    with torch.inference_mode():
        found = PackedLinear(plain)(x)
        assert found.shape == (1, rows, 40)
        assert torch.allclose(found, plain(x), atol=1e-5)


@needs_mkl
def test_layers_are_replaced_wherever_they_are() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(8, 16), nn.ReLU()), "c": shared})
    assert pack(model)
    assert [type(m) for m in model.modules() if hasattr(m, "weight")] == [PackedLinear, PackedLinear]
    assert model["a"] is model["c"]


def test_other_dtypes_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16())
    assert not pack(model)
    assert type(model[0]) is nn.Linear


def test_little_memory_leaves_the_layers_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.engines.packed.SHARE", 0.0)
    model = nn.Sequential(nn.Linear(8, 8))
    assert not pack(model)
    assert type(model[0]) is nn.Linear


@needs_mkl
def test_layout_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], self.out_features))
    model = nn.Sequential(nn.Linear(8, 8))
    assert not pack(model)
    assert type(model[0]) is nn.Linear


@needs_mkl
def test_model_that_fails_packed_runs_plain(
    tiny: Callable[[Family], Path], load: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load("llama").packed

    def spoil(model: Any) -> bool:
        assert pack(model)
        model.lm_head.forward = lambda x: torch.zeros(*x.shape[:-1], model.lm_head.out_features)
        return True

    monkeypatch.setattr(shared.engines.transformers, "pack", spoil)
    assert not TransformersEngine(tiny("llama"), block_size=16).packed
