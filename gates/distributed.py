"""What the ranks of the M6 gates start from and report, and what that is held against.

What they do is in rank_programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gates import toys
from harness.compare import max_abs_error
from reference.distribute import DistributionSettings, named_parameters
from reference.loss import NO_TARGET
from reference.stack import ROLES
from reference.update import TrainState, UpdateRecord, UpdateSettings
from reference.window import Window

Shares = Sequence[Window]  # of one window, one for each rank in order


@dataclass(frozen=True)
class Start:
    """How every rank builds its model: a toy, or the TINY decoder with changes and values.

    strangers: all ranks but the first start from values of their own, which distribute replaces.
    mesh_shape: None for one dimension over all ranks. dropout: in every layer.
    """

    toy: toys.LinearLoss | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    settings: DistributionSettings = field(default_factory=DistributionSettings)
    strangers: bool = False
    mesh_shape: tuple[int, ...] | None = None
    dropout: bool = False


@dataclass(frozen=True)
class Gradient:
    """What accumulate left: its sums, every gradient whole (zeros where there is none); and how
    often attention was called, where that is counted.
    """

    nll_sum: float
    num_targets: int
    num_tokens: int
    tensors: dict[str, Tensor]
    num_attentions: int = 0


@dataclass(frozen=True)
class Look:
    """What a model's parameters look like: whole shapes by name, values, ties, how many there are
    to update.
    """

    shapes: dict[str, list[int]]
    digest: str
    is_tied: bool
    num_in_groups: int


@dataclass(frozen=True)
class Communicated:
    """The collectives of one update: how many and how many bytes by kind, and all in order."""

    counts: dict[str, int]
    num_bytes: dict[str, int]
    issued: list[Any]


@dataclass(frozen=True)
class Updates:
    """Records in order, after each a digest of all parameters; the parameters at the end.

    stopped: the words of NonFiniteError, after which nothing more was done.
    """

    records: list[UpdateRecord]
    digests: list[str]
    parameters: dict[str, Tensor]
    stopped: str = ""


@dataclass(frozen=True)
class Trained:
    """The records of a run, the parameters at its end, and the rows that a rank read by update."""

    records: list[UpdateRecord]
    parameters: dict[str, Tensor]
    rows: list[list[str]]


@dataclass(frozen=True)
class Spread:
    """A gradient and how the ranks hold it: "plain", "sharded", "replicated", "replicas of shards"
    or "sharded twice".
    """

    kind: str
    values: Tensor


@dataclass(frozen=True)
class Clip:
    """The norm that a clip returned, and every gradient after it, whole."""

    norm: float
    gradients: list[Tensor]


def start_of(model: nn.Module, **fields: Any) -> Start:
    """The start of ranks that are to train this model, a decoder or a toy."""
    if isinstance(model, toys.LinearLoss):
        return Start(toy=model.cpu(), **fields)
    values = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return Start(values=values, dtype=next(model.parameters()).dtype, **fields)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on the CPU; of a DTensor gathered, so that all ranks must ask for it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().clone()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, by its name in the model that was distributed."""
    return {name: whole(parameter) for name, parameter in named_parameters(model)}


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the bytes of all tensors, by name order."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def targeted_rows(window: Window) -> list[str]:
    """Every row with a target, by its text and its labels. One without has no part in the loss."""
    return [
        str((ids, labels))
        for microbatch in window.microbatches
        for ids, labels in zip(
            microbatch.input_ids.tolist(), microbatch.labels.tolist(), strict=True
        )
        if set(labels) != {NO_TARGET}
    ]


def together(shares: Shares) -> Window:
    """The window of all ranks' microbatches, as one process reads it."""
    return Window(tuple(m for share in shares for m in share.microbatches))


def ragged_shares(
    rng: torch.Generator, counts: Sequence[Sequence[int]], num_microbatches: int = 1,
    num_tokens: int = 16,
) -> list[Window]:  # fmt: skip
    """Random rows for each rank; row r of a rank has counts[rank][r] targets."""
    return [
        toys.ragged_window(rng, row_counts, num_tokens).split(num_microbatches)
        for row_counts in counts
    ]


def single_process(
    model: nn.Module, windows: Sequence[Shares], settings: UpdateSettings
) -> Updates:
    """The oracle: the reference in float64 in one process, over the windows of all ranks."""
    reference = toys.oracle(model)
    stack: Any = reference.stack
    training = TrainState(reference, stack.param_groups(reference, settings.weight_decay))
    records = [stack.update_window(training, together(s), stack, settings) for s in windows]
    return Updates(records, [], whole_parameters(reference))


def reference_twin(model: nn.Module, compute_dtype: torch.dtype) -> nn.Module:
    """The reference model with the parameters of `model`, computing in another dtype."""
    reference: Any = SimpleNamespace(**ROLES)
    config: Any = model.config
    config = replace(config, compute_dtype=compute_dtype)
    twin: nn.Module = reference.build_model(config, reference)
    twin.load_state_dict(model.state_dict())
    return twin.to(next(model.parameters()).device)


def check_ends(check: Any, outcome: Any, because: str) -> None:
    """Checks that every rank of a job that may fail has finished."""
    ends = [end.words for end in outcome.ends]
    check("how the ranks ended", ends, equal=["finished"] * len(ends), because=because)


def spread(results: Sequence[Any], vector: Callable[[Any], Tensor]) -> float:
    """The largest difference of a vector between the first rank and any other."""
    first, *others = (vector(result) for result in results)
    return max([max_abs_error(other, first) for other in others], default=0.0)
