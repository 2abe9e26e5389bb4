"""What both model families are built from: parameters with a role of the stack to use them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from reference import ops
from reference.config import ModelConfig

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` in `dtype`, or as it is for None: how a parameter enters a computation."""
    return tensor if dtype is None else tensor.to(dtype)


class Linear(nn.Linear):
    """y = stack.linear(x, weight, bias), weights cast to `compute_dtype` where they are used.

    weight [out_features, in_features] ~ Normal(0, std^2); bias, if any, starts at zero. It is an
    nn.Linear so that libraries which look for one, such as peft, find it.
    """

    def __init__(
        self, config: ModelConfig, stack: Any, in_features: int, out_features: int, *, bias: bool
    ) -> None:
        self.std = config.initializer_std  # nn.Linear draws the parameters when it is made
        super().__init__(in_features, out_features, bias)
        self.stack, self.compute_dtype = stack, config.compute_dtype

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stack.linear(x, *self.cast_parameters())
        return y

    def cast_parameters(self) -> tuple[Tensor, Tensor | None]:
        """weight and bias, or None, in the compute dtype."""
        bias = None if self.bias is None else cast(self.bias, self.compute_dtype)
        return cast(self.weight, self.compute_dtype), bias


def project(stack: Any, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """What each of the layers makes of x, in one call where the stack has projections of its own.

    The reference's own would call the reference's linear: a stack that brings only linear has it on
    trial here too. Layers that have become adapters, that hooks watch or whose forward is not their
    own are called themselves.
    """
    if stack.projections is ops.projections or not all(map(_is_bare, layers)):
        return tuple(layer(x) for layer in layers)
    weights, biases = zip(*(layer.cast_parameters() for layer in layers), strict=True)
    outputs: tuple[Tensor, ...] = stack.projections(x, weights, biases)
    return outputs


def gated(stack: Any, x: Tensor, gate: Linear, up: Linear) -> Tensor:
    """swiglu(gate(x), up(x)) of layers without bias, in one call under the same conditions."""
    if stack.gated_linear is ops.gated_linear or not all(map(_is_bare, (gate, up))):
        h: Tensor = stack.swiglu(*project(stack, x, (gate, up)))
    else:
        h = stack.gated_linear(x, gate.cast_parameters()[0], up.cast_parameters()[0])
    return h


def _is_bare(layer: nn.Module) -> bool:
    """Whether a call of the layer is its forward and nothing else."""
    if _has_any_global_hook() or any(getattr(layer, hooks) for hooks in _HOOKS):  # type: ignore[no-untyped-call]
        return False
    return type(layer) is Linear and "forward" not in vars(layer)


class Embedding(nn.Module):
    """Row `ids` of weight [num_rows, width] ~ Normal(0, std^2), cast to `compute_dtype`."""

    def __init__(self, config: ModelConfig, num_rows: int, width: int) -> None:
        super().__init__()
        self.std, self.compute_dtype = config.initializer_std, config.compute_dtype
        self.weight = nn.Parameter(torch.empty(num_rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(F.embedding(ids, self.weight), self.compute_dtype)


def checked_positions(
    input_ids_BT: Tensor, positions_BT: Tensor | None, documents_BT: Tensor | None, limit: int
) -> Tensor:
    """Positions [B, T], which are 0, 1, ... T-1 in every row for None.

    Raises ValueError if the ids are not [B, T], if positions or documents have another shape, or if
    a position is outside [0, limit).
    """
    if input_ids_BT.ndim != 2:
        raise ValueError(f"input_ids must be [B, T], got {list(input_ids_BT.shape)}")
    for name, tensor in (("positions", positions_BT), ("documents", documents_BT)):
        if tensor is not None and tensor.shape != input_ids_BT.shape:
            raise ValueError(
                f"{name} must be {list(input_ids_BT.shape)} like input_ids, got "
                f"{list(tensor.shape)}"
            )
    num_tokens = input_ids_BT.shape[1]
    if num_tokens > limit:
        raise ValueError(
            f"max_positions {limit} does not cover a row of {num_tokens} tokens; shorten the rows "
            f"or raise it"
        )
    if positions_BT is None:
        return torch.arange(num_tokens, device=input_ids_BT.device).expand_as(input_ids_BT)
    if not positions_BT.is_meta and positions_BT.numel():
        low, high = (int(x) for x in positions_BT.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(
                f"positions must lie in [0, {limit}) (max_positions), got {low} to {high}"
            )
    return positions_BT
