"""Linear layers whose weights are laid out once for the processor's matrix kernels, instead of at every product."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor, nn

ROWS = 512
"""Rows the layout is made for. It serves any number, and of those tried this one is the best for all: as fast as the
plain product for one row, 1.5 to 2 times for 4 and 16 (a decode batch), 1.4 for 112, 1.2 for 512."""
CHECKED_ROWS = (1, 3, 16, 65)
TOLERANCE = 1e-4
SHARE = 0.25
"""Of the memory that is free, for packed weights."""


class PackedLinear(nn.Module):
    """``linear`` for inference in float32 on the CPU. ``weight`` keeps shape and dtype only: its values are packed.

    The last bits of a result differ from the plain product's, as they do there between numbers of rows.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.new_zeros(1).expand(linear.weight.shape)
        self.bias = linear.bias
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(linear.weight, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """``[...][in]`` to ``[...][out]``."""
        rows = x.numel() // self.in_features
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self.weight, self.bias, rows)
        return out


@torch.inference_mode()
def pack(model: nn.Module) -> bool:
    """Replace the linear layers of ``model`` by packed ones, one by one, so that weights are never there twice.

    False, and nothing changed, where that is not possible: no MKL, another device or dtype, a layout that computes
    something else than the plain layer does, or too little memory (packed weights are not shared between processes).
    """
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    shapes = {(m.out_features, m.in_features, m.bias is not None): m for m in layers}
    if not layers or not all(_packable(m) for m in layers):
        return False
    if sum(4 * m.weight.numel() for m in layers) > SHARE * psutil.virtual_memory().available:
        return False
    if not all(_computes_the_same(m) for m in shapes.values()):
        return False
    del layers, shapes
    _replace([m for m in model.modules() if type(m) is not nn.Linear])
    return True


def _replace(parents: list[nn.Module]) -> None:
    done: dict[int, PackedLinear] = {}
    for parent in parents:
        for name, child in list(parent._modules.items()):  # named_children() leaves out a layer's second name
            if type(child) is nn.Linear:
                done[id(child)] = done.get(id(child)) or PackedLinear(child)
                setattr(parent, name, done[id(child)])


def _packable(linear: nn.Linear) -> bool:
    weight = linear.weight
    available: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return available and weight.device.type == "cpu" and weight.dtype == torch.float32


def _computes_the_same(linear: nn.Linear) -> bool:
    """The kernels' documentation does not promise that a layout serves other numbers of rows: see for ourselves."""
    try:
        packed = PackedLinear(linear)
        return all(_close(packed, linear, rows) for rows in CHECKED_ROWS)
    except (RuntimeError, AttributeError):  # a torch without these kernels
        return False


def _close(packed: PackedLinear, linear: nn.Linear, rows: int) -> bool:
    x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(rows))
    expected = linear(x)
    scale = float(expected.abs().max()) or 1.0
    return bool(((packed(x) - expected).abs().max() <= TOLERANCE * scale).item())
