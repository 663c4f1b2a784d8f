"""The element-wise work of a block as pure functions, once for eager PyTorch and once for `torch.compile` (`machine.compile`).

A block cannot be compiled as a whole: its matrix gradients are added to `main_grad` in place, or put off by zero-bubble
schedules, and its collectives overlap with matmuls, in autograd functions of ours that a compiler would have to see through.
Matmuls, attention and collectives are library calls either way. What a compiler does better lies between them, and stands
here: norm, rotation, gate, forward and backward. Compiled, each is one pass over memory instead of three to eight; the last
bits differ, within the certificate's bounds.

The eager versions work in place where they can; the others are written as formulas, which is what a compiler fuses best.

Shapes: rows of any number of leading dims; norms over the last dim, D; weights [D]. Reductions in fp32 at least.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ftrain.parallel.weight import precise

Pair = tuple[torch.Tensor, torch.Tensor]


class CompileError(RuntimeError):
    """This machine has nothing to compile with."""


class Kernels(NamedTuple):
    """The functions, by what they do."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], Pair]  # x, weight, eps -> y, 1 / root mean square
    norm_backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair]  # dy, x, inverse, weight -> dx, dw
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]  # x, cos, sin, sign
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # gate, up -> silu(gate) * up
    gate_backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]  # dy, gate, up -> dgate, dup


# --- eager -------------------------------------------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    wide = x.to(precise(x.dtype))
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: torch.Tensor = wide * inverse
    return normed.mul_(weight.to(wide.dtype)).to(x.dtype), inverse


def _norm_backward(dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor) -> Pair:
    size, wide = x.shape[-1], inverse.dtype
    weight = weight.to(wide)
    normed, dy = x * inverse, dy.to(wide)
    product = (dy * normed).view(-1, size)
    mean = torch.mv(product, weight).div_(size).view(inverse.shape)
    dx = torch.mul(dy, weight).addcmul_(normed, mean, value=-1).mul_(inverse)
    return dx.to(x.dtype), product.sum(0)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    wide = x.to(cos.dtype)
    out = torch.empty_like(wide)
    (first, second), (out_first, out_second) = wide.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out.to(x.dtype)


def _gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate).mul_(up)


def _gate_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


EAGER = Kernels(_norm, _norm_backward, _rotate, _gate, _gate_backward)


# --- for the compiler ----------------------------------------------------------------------------------------------------


def _norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    wide = x.to(precise(x.dtype))
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * inverse * weight.to(wide.dtype)).to(x.dtype), inverse


def _norm_backward_formula(dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor) -> Pair:
    wide = inverse.dtype
    normed, weighted = x.to(wide) * inverse, dy.to(wide) * weight.to(wide)
    dx = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * inverse
    return dx.to(x.dtype), (dy.to(wide) * normed).flatten(0, -2).sum(0)


def _rotate_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    first, second = x.to(cos.dtype).chunk(2, -1)
    sin = sin * sign
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _gate_backward_formula(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    wide, dy_wide = gate.to(precise(gate.dtype)), dy.to(precise(gate.dtype))
    slope = wide.sigmoid()
    dgate = dy_wide * up.to(wide.dtype) * slope * (1 + wide * (1 - slope))
    return dgate.to(gate.dtype), (dy_wide * wide * slope).to(gate.dtype)


def _gate_formula(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    wide = gate.to(precise(gate.dtype))
    return (wide * wide.sigmoid() * up.to(wide.dtype)).to(gate.dtype)


@cache
def compiled(device: str) -> Kernels:
    """The same through `torch.compile`, on "cpu" or "cuda"; compiled when first called. CompileError if nothing can be."""
    _require_compiler(device)
    from torch._inductor import config as inductor

    inductor.compile_threads = 1  # in this process: no pool of helpers that would outlive a killed rank
    formulas = (_norm_formula, _norm_backward_formula, _rotate_formula, _gate_formula, _gate_backward_formula)
    return Kernels(*(_compiled(formula) for formula in formulas))


def _compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Of plain tensors, so that what is compiled once serves parameters, leaves and values alike, of any size."""
    function = torch.compile(formula, fullgraph=True, dynamic=True)

    def call(*args: Any) -> Any:
        return function(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args))

    return call


def _require_compiler(device: str) -> None:
    named = os.environ.get("CXX", "")
    tried = (named,) if named else ("g++", "clang++", "c++")
    if device == "cpu" and not any(shutil.which(name) for name in tried):
        raise CompileError(
            f"machine.compile = true needs a C++ compiler for the CPU, and there is none: looked for {', '.join(tried)}. "
            "Install g++, name one in CXX, or set machine.compile = false"
        )


@torch.no_grad()
def prepare(kernels: Kernels, *, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Call everything once, so that compiling happens now. `sizes`: some last dims of norms and gates; others come free."""
    if kernels is EAGER:
        return
    for size in sizes:
        x = torch.zeros(3, 5, size, dtype=dtype, device=device)
        weight = torch.ones(size, dtype=torch.float64 if dtype == torch.float64 else torch.bfloat16, device=device)
        _, inverse = kernels.norm(x, weight, 1.0)
        kernels.norm_backward(x, x, inverse, weight)
        kernels.gate(x, x)
        kernels.gate_backward(x, x, x)
    heads = torch.zeros(3, 5, 7, 16, dtype=dtype, device=device)
    table = torch.zeros(5, 1, 8, dtype=precise(dtype), device=device)
    for sign in (1, -1):
        kernels.rotate(heads, table, table, sign)
