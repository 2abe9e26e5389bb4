"""Small models for the gates of the update: gradients that are written in the data, and tiny
decoders with ragged windows beside their oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import not_run
from reference.config import DecoderConfig
from reference.loss import NO_TARGET
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.update import UpdateSettings
from reference.window import Microbatch, Window

TINY = DecoderConfig(
    vocabulary_size=11,
    model_width=16,
    feed_forward_width=24,
    num_layers=2,
    num_query_heads=2,
    num_kv_heads=1,
    head_width=8,
    max_positions=128,
    qkv_bias=True,
)
# With epsilon far above every gradient and betas 0, AdamW subtracts learning_rate / epsilon * g:
# plain gradient descent, in which the scale of a gradient shows. (Adam's own step hides it.)
OUTWEIGHING_EPSILON = 1e8


@dataclass(frozen=True)
class LinearConfig:
    """What a wrapper may ask of the configuration of LinearLoss."""

    compute_dtype: torch.dtype | None


class LinearLoss(nn.Module):
    """A model whose loss at a target is <weight, directions[token]>, so that the gradient of a
    summed loss is the sum of the directions of its targets, exactly.
    """

    def __init__(
        self,
        directions_VD: Sequence[Sequence[float]],
        start_D: Sequence[float],
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.register_buffer("directions_VD", torch.tensor(directions_VD))
        self.lm_head = nn.Linear(len(start_D), 1, bias=False)
        self.lm_head.weight.data = torch.tensor([list(start_D)], dtype=torch.float32)
        self.config, self.compute_dtype = LinearConfig(compute_dtype), compute_dtype
        self.stack = SimpleNamespace(token_nll=_linear_nll)

    def forward(self, input_ids_BT: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        return self.directions_VD[input_ids_BT].to(self.compute_dtype)


def _linear_nll(hidden_MD: Tensor, weight_1D: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    is_target = labels_M != NO_TARGET
    products = hidden_MD[is_target] * weight_1D.to(hidden_MD.dtype)
    return products.float().sum(), is_target.sum()


def row(ids: Sequence[int], num_targets: int | None = None, num_bytes: int | None = None,
        documents: Sequence[int] | None = None) -> Microbatch:  # fmt: skip
    """One row of tokens of which the first `num_targets` (all by default) are targets."""
    input_ids = torch.tensor([list(ids)])
    labels = input_ids.clone()
    labels[:, len(ids) if num_targets is None else num_targets :] = NO_TARGET
    document_ids = None if documents is None else torch.tensor([list(documents)]).int()
    return Microbatch(input_ids, labels, torch.arange(len(ids))[None], document_ids, num_bytes)


def rows(*microbatches: Microbatch) -> Window:
    """The window of these microbatches."""
    return Window(tuple(microbatches))


def plain_descent(rate: float = 1.0, max_norm: float = 1.0) -> UpdateSettings:
    """Settings under which AdamW is w <- w - rate * clipped gradient, to 1e-7 relative."""
    schedule = Schedule(peak=rate * OUTWEIGHING_EPSILON, total_tokens=2**40)
    return UpdateSettings(
        schedule, max_norm, weight_decay=0.0, betas=(0.0, 0.0), epsilon=OUTWEIGHING_EPSILON
    )


def working_dtype(stack: Any) -> torch.dtype:
    """The widest dtype that the stack on trial takes: in float64 only a wrong formula shows."""
    widest: torch.dtype = stack.dtypes[0]
    return widest


def require_bfloat16(stack: Any) -> torch.dtype:
    """bfloat16, in which models compute; NOT_RUN if the stack on trial does not take it here."""
    if torch.bfloat16 not in stack.dtypes:
        not_run("What is on trial declares no bfloat16 on this device (DTYPES), and models compute "
                "in bfloat16 or in the dtype of their parameters.")  # fmt: skip
    return torch.bfloat16


def half_dtype(stack: Any) -> torch.dtype:
    """bfloat16 if the stack on trial takes it, else float16; NOT_RUN if it takes neither."""
    taken = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in stack.dtypes]
    if not taken:
        not_run("What is on trial declares no 16-bit dtype (DTYPES); this gate is about one.")
    return taken[0]


def rounding(dtype: torch.dtype) -> float:
    """A bound for relative errors of sums taken in another order: 2^13 units of last place."""
    return 2**13 * torch.finfo(dtype).eps


def tiny_model(stack: Any, device: torch.device, **changes: Any) -> nn.Module:
    """The TINY decoder of the stack on trial in its working dtype."""
    config = replace(TINY, **changes)
    return stack.build_model(config, stack).to(device, working_dtype(stack))


def ragged_window(rng: torch.Generator, counts: Sequence[int], num_tokens: int = 16) -> Window:
    """One microbatch of random rows; row r has `counts[r]` targets at random places."""
    shape = (len(counts), num_tokens)
    input_ids = torch.randint(TINY.vocabulary_size, shape, generator=rng)
    labels = torch.full(shape, NO_TARGET)
    for index, count in enumerate(counts):
        places = torch.randperm(num_tokens, generator=rng)[:count]
        labels[index, places] = torch.randint(TINY.vocabulary_size, (count,), generator=rng)
    return Window((Microbatch(input_ids, labels, torch.arange(num_tokens).expand(shape)),))


def oracle(model: nn.Module) -> nn.Module:
    """The reference model with the parameters of `model`, in float64 on the CPU."""
    reference = SimpleNamespace(**ROLES)
    twin = reference.build_model(replace(model.config, compute_dtype=None), reference).double()
    twin.load_state_dict(
        {name: t.detach().cpu().double() for name, t in model.state_dict().items()}
    )
    return twin


def token_mean(model: nn.Module, window: Window) -> tuple[float, dict[str, Tensor]]:
    """The window's mean loss in nats and its gradient, from one pass over all rows at once."""
    twin = oracle(model)
    whole = window.to("cpu").split(1).microbatches[0]
    hidden_BTD = twin(whole.input_ids, whole.positions, whole.documents)
    logits_MV = (hidden_BTD @ twin.lm_head.weight.T).flatten(0, 1)
    nll_sum = F.cross_entropy(logits_MV, whole.labels.flatten(), reduction="sum")
    loss = nll_sum / (whole.labels != NO_TARGET).sum()
    names, parameters = zip(*twin.named_parameters(), strict=True)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All values in one float64 vector on the CPU, by name order."""
    return torch.cat([tensors[name].detach().cpu().double().flatten() for name in sorted(tensors)])
