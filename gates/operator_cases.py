"""Inputs for the trials of the operators: one function a role, and a small example of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gates.operators import Case, normal
from reference.loss import NO_TARGET
from reference.ops import rms_norm

EPSILON = 1e-6


def uneven(rng: torch.Generator, rows: int, width: int, scale: float) -> Tensor:
    """Rows that differ in scale by up to 16 either way."""
    exponents = torch.randint(-4, 5, (rows, 1), generator=rng).double()
    return normal(rng, rows, width, scale=scale) * 2.0**exponents


def norm_case(
    rng: torch.Generator, rows: int, width: int, scale: float = 1.0, eps: float = EPSILON
) -> Case:
    """rms_norm of rows that differ in scale by up to 16 either way."""
    x = uneven(rng, rows, width, scale)
    tensors = {"x": x, "weight": 1 + normal(rng, width, scale=0.3)}
    return Case("rms_norm", tensors, lambda t: (t["x"], t["weight"], eps), by_row={"dx": "y"})


def rounded_total(dtype: torch.dtype) -> Callable[..., Any]:
    """The oracle of add_rms_norm: only the total is rounded to `dtype`, as the contract says."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        total = x + residual
        total = total + (total.to(dtype).double() - total).detach()
        return rms_norm(total, weight, eps), total

    return add_rms_norm


def add_norm_case(
    rng: torch.Generator, rows: int, width: int, scale: float = 1.0, eps: float = EPSILON
) -> Case:
    """add_rms_norm of two streams whose rows differ in scale."""
    x, residual = uneven(rng, rows, width, scale), uneven(rng, rows, width, scale)
    tensors = {"x": x, "residual": residual, "weight": 1 + normal(rng, width, scale=0.3)}

    def arguments(t: dict[str, Tensor]) -> tuple[Any, ...]:
        return t["x"], t["residual"], t["weight"], eps

    return Case(
        "add_rms_norm",
        tensors,
        arguments,
        ("y", "total"),
        oracle=rounded_total,
        by_row={"dx": "y", "dresidual": "y"},
    )


def swiglu_case(rng: torch.Generator, *shape: int, scale: float = 2.0) -> Case:
    """swiglu of gates on both sides of zero."""
    tensors = {"gate": normal(rng, *shape, scale=scale), "up": normal(rng, *shape, scale=scale)}
    return Case(
        "swiglu", tensors, lambda t: (t["gate"], t["up"]), ("h",), by_row={"dgate": "h", "dup": "h"}
    )


def gated_case(rng: torch.Generator, rows: int, inputs: int, outputs: int) -> Case:
    """gated_linear with gates and ups of about 2."""
    scale = 2 * inputs**-0.5
    return gated_of(
        {
            "x": normal(rng, rows, inputs),
            "gate_weight": normal(rng, outputs, inputs, scale=scale),
            "up_weight": normal(rng, outputs, inputs, scale=scale),
        }
    )


def gated_of(tensors: dict[str, Tensor]) -> Case:
    """gated_linear of x, gate_weight and up_weight."""
    return Case("gated_linear", tensors, lambda t: tuple(t.values()), ("h",), by_row={"dx": "h"})


def linear_case(
    rng: torch.Generator, rows: int, inputs: int, outputs: int, bias: bool = True
) -> Case:
    """linear with outputs of about 1."""
    tensors = {
        "x": normal(rng, rows, inputs),
        "weight": normal(rng, outputs, inputs, scale=inputs**-0.5),
    }
    if bias:
        tensors["bias"] = normal(rng, outputs)
    return Case(
        "linear", tensors, lambda t: (t["x"], t["weight"], t.get("bias")), by_row={"dx": "y"}
    )


def with_large_products(x: Tensor, weight: Tensor) -> None:
    """Puts products of 90000, -90000, 90000, -90000 among those of each x weight^T."""
    x[:, 100:104] = 300.0
    weight[:, 100:104] = weight.new_tensor([300.0, -300.0, 300.0, -300.0])


def lost_by_rounding(rows: int, outputs: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """bfloat16 x [rows, 512] and weight [outputs, 512], and what every x weight^T is exactly.

    (1 + e)^2 - (1 + 2 e) = e^2, 256 times: bfloat16 rounds the square to 1 + 2 e.
    """
    eps = torch.finfo(torch.bfloat16).eps
    pairs = torch.tensor([[1 + eps, 1 + 2 * eps], [1 + eps, -1.0]], device=device).bfloat16()
    return pairs[0].repeat(rows, 256), pairs[1].repeat(outputs, 256), 256 * eps**2


def projections_case(
    rng: torch.Generator, rows: int, inputs: int, outputs: tuple[int, ...], bias: bool = True
) -> Case:
    """projections of one input to several widths, with outputs of about 1."""
    tensors = {"x": normal(rng, rows, inputs)}
    for i, width in enumerate(outputs):
        tensors[f"weight{i}"] = normal(rng, width, inputs, scale=inputs**-0.5)
    if bias:
        tensors |= {f"bias{i}": normal(rng, width) for i, width in enumerate(outputs)}
    return projections_of(tensors)


def projections_of(tensors: dict[str, Tensor]) -> Case:
    """projections of x with weight0, weight1 and so on, and bias0, bias1 if there are any."""
    num_outputs = sum(name.startswith("weight") for name in tensors)

    def arguments(t: dict[str, Tensor]) -> tuple[Any, ...]:
        weights = [t[f"weight{i}"] for i in range(num_outputs)]
        return t["x"], weights, [t.get(f"bias{i}") for i in range(num_outputs)]

    outputs = tuple(f"y{i}" for i in range(num_outputs))
    return Case("projections", tensors, arguments, outputs, by_row={"dx": "y0"})


def rope_case(
    rng: torch.Generator,
    positions_BT: Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    head_width: int,
    theta: float = 1e4,
) -> Case:
    """rope at these positions."""
    B, T = positions_BT.shape
    tensors = {
        "q": normal(rng, B, T, num_query_heads, head_width),
        "k": normal(rng, B, T, num_kv_heads, head_width),
    }

    def arguments(t: dict[str, Tensor]) -> tuple[Any, ...]:
        return t["q"], t["k"], positions_BT.to(t["q"].device), theta

    return Case("rope", tensors, arguments, ("q", "k"), by_row={"dq": "q", "dk": "k"})


def attention_case(
    rng: torch.Generator,
    documents_BT: Tensor | None,
    shape: tuple[int, int, int, int, int],
    scale: float = 1.0,
) -> Case:
    """attention of [B, T, N, K, H]; `scale` multiplies queries and keys."""
    B, T, N, K, H = shape
    tensors = {
        "q": normal(rng, B, T, N, H, scale=scale),
        "k": normal(rng, B, T, K, H, scale=scale),
        "v": normal(rng, B, T, K, H),
    }

    def arguments(t: dict[str, Tensor]) -> tuple[Any, ...]:
        documents = None if documents_BT is None else documents_BT.to(t["q"].device)
        return t["q"], t["k"], t["v"], documents

    return Case("attention", tensors, arguments, ("o",), shared=H, by_row={"dq": "o"})


def nll_case(
    rng: torch.Generator,
    labels_M: Tensor,
    width: int,
    vocabulary_size: int,
    spread: float = 2.0,
    mean: float = 0.0,
) -> Case:
    """token_nll with logits of standard deviation `spread` about `mean`."""
    hidden_MD = normal(rng, len(labels_M), width)
    weight_VD = normal(rng, vocabulary_size, width, scale=spread * width**-0.5)
    if mean:
        hidden_MD[:, 0], weight_VD[:, 0] = 1.0, mean

    def arguments(t: dict[str, Tensor]) -> tuple[Any, ...]:
        return t["hidden"], t["weight"], labels_M.to(t["hidden"].device)

    tensors = {"hidden": hidden_MD, "weight": weight_VD}
    # The sum is float32, its gradients may be float16, which ends at 65504 and 6e-5.
    return Case("token_nll", tensors, arguments, ("nll", "tokens"), row_exponent=2, shared=width)


def some_labels(
    rng: torch.Generator, rows: int, vocabulary_size: int, ignored: float = 0.3
) -> Tensor:
    """Random labels of which a share is no target; the first and last token are among them."""
    labels_M = torch.randint(vocabulary_size, (rows,), generator=rng)
    labels_M[torch.rand(rows, generator=rng) < ignored] = NO_TARGET
    if rows > 1:
        labels_M[0], labels_M[-1] = vocabulary_size - 1, 0
    return labels_M


def ragged_documents() -> Tensor:
    """documents [2, 67] int32 of documents of 1 to 37 tokens."""
    lengths = torch.tensor([[1, 17, 2, 37, 10], [33, 1, 1, 31, 1]])
    names = torch.tensor([9, 2, 7, 1, 4], dtype=torch.int32)
    return torch.stack([names.repeat_interleave(row) for row in lengths])


EXAMPLES: dict[str, Callable[[torch.Generator], Case]] = {
    "rms_norm": lambda rng: norm_case(rng, 37, 64),
    "add_rms_norm": lambda rng: add_norm_case(rng, 37, 64),
    "rope": lambda rng: rope_case(rng, torch.randint(99, (2, 19), generator=rng), 6, 2, 64),
    "swiglu": lambda rng: swiglu_case(rng, 37, 64),
    "linear": lambda rng: linear_case(rng, 37, 64, 33),
    "projections": lambda rng: projections_case(rng, 37, 64, (64, 33, 33)),
    "gated_linear": lambda rng: gated_case(rng, 37, 64, 33),
    "attention": lambda rng: attention_case(rng, None, (2, 33, 6, 2, 64)),
    "token_nll": lambda rng: nll_case(rng, some_labels(rng, 37, 131), 64, 131),
}

# The same roles where every last tile is cut short.
ODD_EXAMPLES: dict[str, Callable[[torch.Generator], Case]] = {
    "rms_norm": lambda rng: norm_case(rng, 131, 33),
    "add_rms_norm": lambda rng: add_norm_case(rng, 131, 33),
    "rope": lambda rng: rope_case(rng, torch.randint(99, (1, 67), generator=rng), 7, 1, 16),
    "swiglu": lambda rng: swiglu_case(rng, 131, 33),
    "linear": lambda rng: linear_case(rng, 131, 33, 64),
    "projections": lambda rng: projections_case(rng, 131, 33, (64, 17)),
    "gated_linear": lambda rng: gated_case(rng, 131, 33, 17),
    "attention": lambda rng: attention_case(rng, ragged_documents(), (2, 67, 6, 2, 64)),
    "token_nll": lambda rng: nll_case(rng, some_labels(rng, 131, 131), 64, 131),
}

# What comes in between: other shapes of the same widths, and other constants.
VARIED: dict[str, Callable[[torch.Generator], list[Case]]] = {
    "rms_norm": lambda rng: [
        norm_case(rng, 37, 64, eps=0.1),
        norm_case(rng, 71, 64),
        norm_case(rng, 131, 33),
    ],
    "add_rms_norm": lambda rng: [
        add_norm_case(rng, 37, 64, eps=0.1),
        add_norm_case(rng, 71, 64),
        add_norm_case(rng, 131, 33),
    ],
    "rope": lambda rng: [
        rope_case(rng, torch.randint(99, (2, 19), generator=rng), 6, 2, 64, theta=1e6),
        rope_case(rng, torch.randint(99, (1, 67), generator=rng), 6, 2, 64),
        rope_case(rng, torch.randint(99, (1, 67), generator=rng), 7, 1, 16),
    ],
    "swiglu": lambda rng: [swiglu_case(rng, 131, 33), swiglu_case(rng, 3, 5, 64)],
    "linear": lambda rng: [
        linear_case(rng, 37, 64, 33, bias=False),
        linear_case(rng, 71, 64, 33),
        linear_case(rng, 131, 33, 64),
    ],
    "projections": lambda rng: [
        projections_case(rng, 37, 64, (64, 33, 33), bias=False),
        projections_case(rng, 71, 64, (64, 33, 33)),
        projections_case(rng, 131, 33, (64, 17)),
    ],
    "gated_linear": lambda rng: [gated_case(rng, 131, 33, 17), gated_case(rng, 37, 64, 64)],
    "attention": lambda rng: [
        attention_case(rng, ragged_documents(), (2, 67, 6, 2, 64)),
        attention_case(rng, None, (1, 129, 6, 2, 64)),
    ],
    "token_nll": lambda rng: [
        nll_case(rng, some_labels(rng, 37, 131), 64, 131),
        nll_case(rng, some_labels(rng, 131, 131, ignored=0.0), 64, 131),
    ],
}
