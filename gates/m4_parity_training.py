"""M4. Five AdamW updates go where transformers and torch.optim.AdamW go."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gates import probes, toys, twins
from gates.m4_parity_forward import MANY, OPERATORS, SHAPES, built, random_batch
from gates.operators import RATIOS
from harness import gate
from harness.compare import relative_error
from reference.config import DecoderConfig
from reference.schedule import Schedule
from reference.update import TrainState, UpdateSettings
from reference.window import Window

NUM_UPDATES = 5
SETTINGS = UpdateSettings(Schedule(peak=3e-4, total_tokens=2**40), max_norm=0.5)
ROLES = [
    "build_model",
    *OPERATORS,
    "accumulate",
    "clip_grad_norm",
    "param_groups",
    "optimizer_step",
    "learning_rate",
    "update_window",
]
# Every shape once, and every layout.
CASES = {
    "llama-1-rows": ("llama-1", "rows"),
    "llama-3-packed": ("llama-3", "packed"),
    "qwen2-7-padded": ("qwen2-7", "padded"),
    "qwen2-8-packed": ("qwen2-8", "packed"),
}


@dataclass(frozen=True)
class Trajectory:
    """Of each update the loss in nats a target and the gradient norm before clipping; and every
    parameter after the last one, on the CPU."""

    losses: list[float]
    norms: list[float]
    parameters: Mapping[str, Tensor]

    def moved(self, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How far each parameter has come from where it started, in float64."""
        return {n: p.double() - start[n].double() for n, p in self.parameters.items()}


def updates_of_stack(
    stack: Any,
    model: nn.Module,
    windows: Sequence[Sequence[twins.Batch]],
    settings: UpdateSettings = SETTINGS,
) -> Trajectory:
    """`stack.update_window` on each window; a window is some microbatches."""
    training = TrainState(model, stack.param_groups(model, settings.weight_decay))
    records = []
    for batches in windows:
        window = Window(tuple(batch.microbatch for batch in batches))
        records.append(stack.update_window(training, window, stack, settings))
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return Trajectory([r.loss_nats for r in records], [r.grad_norm for r in records], parameters)


def updates_of_oracle(
    config: DecoderConfig, weights: Mapping[str, Tensor], windows: Sequence[Sequence[twins.Batch]]
) -> Trajectory:
    """The same by the reference in float64 on the CPU."""
    model = built(probes.REFERENCE, config, weights, "cpu").double()
    on_cpu = [[batch.to("cpu") for batch in batches] for batches in windows]
    return updates_of_stack(probes.REFERENCE, model, on_cpu)


def updates_of_twin(
    twin: nn.Module,
    windows: Sequence[Sequence[twins.Batch]],
    settings: UpdateSettings = SETTINGS,
) -> Trajectory:
    """The same by torch.optim.AdamW and torch's own clip, over float32 copies of the weights."""
    masters = {
        name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
        for name, p in twin.named_parameters()
    }
    groups = [
        {"params": [p for p in masters.values() if (p.dim() > 1) is is_matrix], "weight_decay": w}
        for is_matrix, w in ((True, settings.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.schedule.peak, betas=settings.betas, eps=settings.epsilon
    )
    losses, norms = [], []
    for batches in windows:
        losses.append(_backward(twin, batches))
        for name, parameter in twin.named_parameters():
            masters[name].grad = parameter.grad.float()
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), settings.max_norm)))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(masters[name])
    parameters = {n.removeprefix("model."): p.detach().cpu() for n, p in masters.items()}
    return Trajectory(losses, norms, parameters)


def _backward(twin: nn.Module, batches: Sequence[twins.Batch]) -> float:
    """Leaves the gradient of the token mean over all batches; returns it."""
    twin.zero_grad(set_to_none=True)
    num_targets, total = sum(batch.microbatch.num_targets for batch in batches), 0.0
    for batch in batches:
        _, _, logits_BTV = twins.forward(twin, batch)
        nll = nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), batch.microbatch.labels.flatten(), reduction="sum"
        )
        (nll / num_targets).backward()
        total += float(nll.detach())
    return total / num_targets


def windows_of(rng, config, layout, device, shape=(2, 96)):
    """Two microbatches a window; the second has a third of the first's targets."""
    windows = []
    for _ in range(NUM_UPDATES):
        first, second = (random_batch(rng, config, layout, shape=shape) for _ in range(2))
        num_targets = second.microbatch.num_targets // 3
        (fewer,) = Window((second.microbatch,)).trim(num_targets).microbatches
        windows.append([first.to(device), twins.Batch(fewer, layout).to(device)])
    return windows


# What does not depend on what is on trial is made once for all variants of a case.


@functools.lru_cache(maxsize=1)
def known_float32(case, seed, device):
    """(weights, windows, updates of transformers, what rounding does) of a case.

    What rounding does to a parameter: how far transformers or the reference in float32, whichever
    is further, ends from the reference in float64.
    """
    (name, layout), rng = CASES[case], torch.Generator().manual_seed(seed)
    config = SHAPES[name]
    weights = twins.random_weights(config, rng)
    windows = windows_of(rng, config, layout, device)
    twin = twins.load(twins.build(config, torch.float32, device), weights)
    want = updates_of_twin(twin, windows)
    plain = updates_of_stack(
        probes.REFERENCE, built(probes.REFERENCE, config, weights, device), windows
    )
    oracle = updates_of_oracle(config, weights, windows)
    rounding = {
        name: max(relative_error(found.parameters[name], end) for found in (want, plain))
        for name, end in oracle.parameters.items()
    }
    return weights, windows, want, rounding


@functools.lru_cache(maxsize=1)
def known_bfloat16(case, seed, device):
    """(weights, windows, updates of the oracle, updates of transformers in bfloat16) of a case."""
    (name, layout), rng = CASES[case], torch.Generator().manual_seed(seed)
    config = SHAPES[name]
    weights = twins.random_weights(config, rng, torch.bfloat16)
    windows = windows_of(rng, config, layout, device, MANY)
    oracle = updates_of_oracle(config, weights, windows)
    twin = twins.load(twins.build(config, torch.bfloat16, device), weights)
    return weights, windows, oracle, updates_of_twin(twin, windows)


@gate(
    claim="in float32, losses, gradient norms and parameters of five updates are those of "
    "transformers with torch.optim.AdamW, to 1e-5; a parameter to 8 times what rounding does to "
    "it, where that is more",
    roles=ROLES,
    not_claimed="a learning rate that changes (m2_schedule)",
    source="torch.optim.AdamW, torch.nn.utils.clip_grad_norm_, transformers' Qwen2 and Llama",
)
@pytest.mark.parametrize("case", CASES)
def test_float32(stack, case, rng, device, check):
    weights, windows, want, rounding = known_float32(case, rng.initial_seed(), device)
    model = built(stack, SHAPES[CASES[case][0]], weights, device)
    got = updates_of_stack(stack, model, windows)
    check_close(check, got, want, weights, rounding)


def check_close(check, got, want, start, rounding=MappingProxyType({})):
    """Two trajectories in float32 from the same parameters `start`.

    `rounding` may say what rounding does to a parameter, relative to its 2-norm.
    """
    for mine, theirs in zip(got.losses, want.losses, strict=True):
        check("loss of an update, worst", abs(mine / theirs - 1), at_most=1e-5,
              because="relative; float32 on both sides")  # fmt: skip
    for mine, theirs in zip(got.norms, want.norms, strict=True):
        check("gradient norm of an update, worst", abs(mine / theirs - 1), at_most=1e-5,
              because="relative, before clipping; Adam hides a scale")  # fmt: skip
    check("smallest gradient norm / max_norm", min(want.norms) / SETTINGS.max_norm, at_least=1.0,
          because="every update is clipped")  # fmt: skip
    check("parameters", sorted(got.parameters), equal=sorted(want.parameters),
          because="a tied table is one")  # fmt: skip
    for name, end in want.parameters.items():
        began, end = start[name].double(), end.double()
        error = (got.parameters[name].double() - end).norm()
        noise = rounding.get(name, 0.0)
        allowed = max(1e-5, RATIOS[torch.float32][0] * noise)
        because = "1e-5 of its 2-norm" if allowed == 1e-5 else (
            f"8 times what rounding does, {noise:.1e} of its 2-norm: where a gradient mostly "
            "cancels, as that of k_proj.bias does, Adam takes its rounding for a direction"
        )  # fmt: skip
        check(f"parameter after {NUM_UPDATES} updates, error over what is allowed, worst",
              error / began.norm() / allowed, at_most=1.0,
              because=f"{because}; {name}")  # fmt: skip
        check("way that a parameter went, worst", error / (end - began).norm(), at_most=1e-2,
              because="relative to its own 2-norm: where a gradient is zero but for rounding, "
              "Adam's first step goes either way")  # fmt: skip


@gate(
    claim="in bfloat16, five updates stray from the oracle's at most 1.5 times as far as "
    "transformers' do, with losses within 1e-3",
    roles=ROLES,
    not_claimed="that training in bfloat16 converges alike (M5)",
    source="the reference in float64 on the CPU; transformers in bfloat16 over float32 weights",
)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16(stack, case, rng, device, check):
    config = replace(SHAPES[CASES[case][0]], compute_dtype=toys.require_bfloat16(stack))
    weights, windows, oracle, plain = known_bfloat16(case, rng.initial_seed(), device)
    model = built(stack, config, weights, device)
    got = updates_of_stack(stack, model, windows)
    for mine, theirs, exact in zip(got.losses, plain.losses, oracle.losses, strict=True):
        check("loss of an update, worst", abs(mine / theirs - 1), at_most=1e-3,
              because="relative to transformers' in bfloat16: the end-to-end bound")  # fmt: skip
        check("loss of an update beside the oracle's, worst", abs(mine / exact - 1), at_most=2e-3,
              because="rounding the new weights to bfloat16, which both sides do, moves it by "
              "5e-4 without any other rounding")  # fmt: skip
    for mine, exact in zip(got.norms, oracle.norms, strict=True):
        check("gradient norm of an update, worst", abs(mine / exact - 1), at_most=2e-2,
              because="relative to the oracle's; the classical bound of bfloat16")  # fmt: skip
    check("parameters", sorted(got.parameters), equal=sorted(oracle.parameters),
          because="a tied table is one")  # fmt: skip
    ways = [toys.flat(trajectory.moved(weights)) for trajectory in (got, plain, oracle)]
    errors = [relative_error(way, ways[-1]) for way in ways[:-1]]
    check("way that the parameters went, error over that of transformers", errors[0] / errors[1],
          at_most=1.5, because="k times the error of transformers in bfloat16")  # fmt: skip
