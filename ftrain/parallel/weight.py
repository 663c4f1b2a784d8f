"""Weights without a `.grad`: each backward adds its weight gradient straight into `main_grad`, in the gradient's precision.

autograd would give each bf16 parameter a bf16 gradient and add micro-batches up in it: 1 % off after 64 of them. The bf16
weight is kept as it is and upcast where it is used: a transient copy, much cheaper than the matmul that follows, and bf16
matmuls are many times slower where the hardware lacks them. `accumulate` is the one place where a matrix gets its gradient.

A parameter that is no `Weight` is one that `fully_shard` gathered for the moment: its gradient is returned to autograd, in the
gradient's precision as well (such parameters are gathered rounded, into a tensor of that type), and FSDP takes it from there.

Shape suffixes: N rows (positions), D and I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function


class Weight(torch.nn.Parameter):
    """A parameter whose gradient is added to `main_grad` instead of appearing in `.grad`."""

    main_grad: torch.Tensor


def add_grad(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Give a small weight its gradient: what its backward returns to autograd."""
    if not isinstance(weight, Weight):
        return grad
    weight.main_grad.add_(grad)
    return None


Outer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a matrix's gradient is made of: the weight, the output's gradient, the input."""

_later: list[list[Outer]] = []


@contextmanager
def put_off(queue: list[Outer]) -> Iterator[None]:
    """Matrix gradients of the backwards in this block are kept in `queue` instead, for `make_up`: zero-bubble schedules.

    Global, not per thread: on a GPU autograd runs backward functions in a thread of its own. One backward runs at a time.
    """
    _later.append(queue)
    try:
        yield
    finally:
        _later.pop()


def make_up(queue: list[Outer]) -> None:
    """Add the gradients that were put off, in their order, and let go of what they were made of."""
    with torch.no_grad():
        for weight, dy_NO, x_NI in queue:
            accumulate(weight, dy_NO, x_NI)
    queue.clear()


def accumulate(weight: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor | None:
    """weight.main_grad += dy.T @ x, summed in the gradient's own precision: what a backward returns to autograd."""
    if not isinstance(weight, Weight):
        if weight.dtype == dy_NO.dtype or not weight.is_cuda:
            return dy_NO.t().to(weight.dtype) @ x_NI.to(weight.dtype)
        return torch.mm(dy_NO.t(), x_NI, out_dtype=weight.dtype)
    if _later:
        _later[-1].append((weight, dy_NO, x_NI))
        return None
    grad = weight.main_grad
    if grad.dtype == dy_NO.dtype:
        grad.addmm_(dy_NO.t(), x_NI)
    elif grad.is_cuda:
        grad.add_(torch.mm(dy_NO.t(), x_NI, out_dtype=grad.dtype))
    else:
        grad.addmm_(dy_NO.t().to(grad.dtype), x_NI.to(grad.dtype))
    return None


def accumulate_rows(weight: torch.Tensor, rows_N: torch.Tensor, dy_ND: torch.Tensor) -> torch.Tensor | None:
    """weight.main_grad[rows] += dy, row by row in a fixed order: what a backward returns to autograd."""
    grad = weight.main_grad if isinstance(weight, Weight) else torch.zeros_like(weight)
    dy_ND = dy_ND.to(grad.dtype)
    if grad.is_cuda:  # index_add_ uses atomics there, whose order is not reproducible
        grad.index_put_((rows_N,), dy_ND, accumulate=True)
    else:
        grad.index_add_(0, rows_N, dy_ND)
    return None if isinstance(weight, Weight) else grad


def precise(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half-width types, the type itself otherwise: for reductions, norms, angles and the loss."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def project(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ w.T for several weights [out, in] of the same input [..., in], which is kept once."""
    outputs: tuple[torch.Tensor, ...] = _Project.apply(x, *weights)
    return outputs


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T"""
    return project(x, weight)[0]


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.weights = weights
        return tuple(F.linear(x, weight.to(x.dtype)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_ND = x.reshape(-1, x.shape[-1])
        dx_ND: torch.Tensor | None = None
        dweights = []
        for weight, grad in zip(ctx.weights, grads, strict=True):
            dy_NO = grad.reshape(-1, grad.shape[-1])
            dweights.append(accumulate(weight, dy_NO, x_ND))
            wide = weight.to(x.dtype)
            dx_ND = dy_NO @ wide if dx_ND is None else dx_ND.addmm_(dy_NO, wide)
        assert dx_ND is not None
        return dx_ND.view(x.shape), *dweights
