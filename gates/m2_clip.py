"""M2. One clip of the whole gradient, after accumulation and before the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from gates import toys
from harness import gate
from harness.compare import max_abs_error, relative_error
from reference.optimizer import clip_grad_norm
from reference.update import TrainState

SOURCE = "Pascanu et al. 2013, algorithm 1: g <- g * min(1, max_norm / ||g||)"
SHAPES = ((3, 5), (7,), (1,), (2, 3, 4))
# torch's own clip divides by norm + 1e-6: 1e-6 relative at norm 1, and float32 rounds at 6e-8.
CLIP_TOLERANCE = 3e-6
CLIP_BECAUSE = "float32, and the 1e-6 that torch adds to the norm of at least 1"


def parameters_with(rng, device, norm):
    """Parameters whose gradients have this norm together; the last has no gradient."""
    gradients = [torch.randn(shape, generator=rng) for shape in SHAPES]
    raw = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in (*SHAPES, (4,))]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = (gradient * (norm / raw)).float().to(device)
    return parameters


def gradient_of(parameters):
    return torch.cat([p.grad.detach().cpu().double().flatten() for p in parameters[:-1]])


@gate(
    claim="gradients above the limit are scaled to it together, those below stay bit for bit",
    roles=["clip_grad_norm"],
    not_claimed="norms over several ranks",
    source=SOURCE,
)
@pytest.mark.parametrize("norm", [0.43, 0.999, 1.001, 5.3, 1.1e4])
def test_norm_and_factor(stack, norm, rng, device, check):
    parameters = parameters_with(rng, device, norm)
    before = gradient_of(parameters)
    got = stack.clip_grad_norm(parameters, 1.0, None)
    after = gradient_of(parameters)
    check(
        "returned norm / norm before clipping",
        float(got) / float(before.norm()),
        within=(1 - 1e-6, 1 + 1e-6),
        because="a float32 sum of 47 squares against float64",
    )
    if norm < 1:
        check("largest change", max_abs_error(after, before), equal=0.0, because="nothing to clip")
    else:
        check(
            "relative error of the clipped gradient",
            relative_error(after, before / before.norm()),
            at_most=CLIP_TOLERANCE,
            because=CLIP_BECAUSE,
        )
    check("gradient of the idle parameter", parameters[-1].grad is None, equal=True,
          because="a parameter without a gradient is not given one")  # fmt: skip


@gate(
    claim="a norm that is not finite is returned as such and the gradients are left",
    roles=["clip_grad_norm"],
    not_claimed="what the update does with it (m2_windows)",
    source="a factor of NaN or 0 would destroy, or hide, what went wrong",
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite(stack, bad, rng, device, check):
    parameters = parameters_with(rng, device, norm=5.0)
    parameters[0].grad[1, 2] = bad
    before = gradient_of(parameters)
    norm = float(stack.clip_grad_norm(parameters, 1.0, None))
    after = gradient_of(parameters)
    kept = before.isfinite()
    check("norm is finite", norm - norm == 0, equal=False, because="the caller must see it")
    check(
        "largest change of a finite gradient",
        max_abs_error(after[kept], before[kept]),
        equal=0.0,
        because="there is no factor that makes them right",
    )
    check("still not finite", int((~after.isfinite()).sum()), equal=1, because="not papered over")


@gate(
    claim="the sum [2, 2] is clipped, not its parts [2, 0] and [0, 2]; then it is applied",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "update_window"],
    not_claimed="Adam's own step, which epsilon outweighs here",
    source="facebookresearch/lingua PR#59: [0.707, 0.707] is right, [0.447, 0.894] is wrong",
)
def test_once_after_accumulation(stack, device, check):
    model = toys.LinearLoss([[4.0, 0.0], [0.0, 4.0]], start_D=[0.0, 0.0]).to(device)
    window = toys.rows(toys.row([0]), toys.row([1])).to(device)
    training = TrainState(model, stack.param_groups(model, 0.0))
    record = stack.update_window(training, window, stack, toys.plain_descent(max_norm=1.0))
    displacement = -model.lm_head.weight.detach().cpu()[0]
    for index in (0, 1):
        check(
            f"step along axis {index}",
            displacement[index],
            within=(0.5**0.5 - 1e-5, 0.5**0.5 + 1e-5),
            because="1/sqrt(2), in float32; clipping each part first gives 0.447 and 0.894",
        )
    check(
        "recorded norm",
        record.grad_norm,
        within=(8**0.5 - 1e-5, 8**0.5 + 1e-5),
        because="sqrt(4 + 4), the norm before clipping",
    )


@gate(
    claim="what the optimizer applies is the clipped gradient of the window's token mean",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "update_window"],
    not_claimed="Adam's own step, which epsilon outweighs here",
    source="awslabs/graphstorm PR#1382: a clip after the step has no effect; the displacement "
    "must equal the limit. harubaru/waifu-diffusion#64: a clip of scaled gradients clips all",
)
@pytest.mark.parametrize("norm", [0.5, 3.0])
@pytest.mark.parametrize("k", [1, 3])
def test_displacement(stack, norm, k, device, check):
    model = toys.LinearLoss([[norm, 0.0]], start_D=[0.0, 0.0]).to(device)
    window = toys.rows(*[toys.row([0]) for _ in range(6)]).split(k)
    training = TrainState(model, stack.param_groups(model, 0.0))
    settings = toys.plain_descent(max_norm=1.0)
    for update in (1, 2, 3):
        start = model.lm_head.weight.detach().clone()
        record = stack.update_window(training, window.to(device), stack, settings)
        want = min(norm, 1.0)
        check(
            "length of the step",
            (model.lm_head.weight.detach() - start).norm(),
            within=(want * (1 - 1e-5), want * (1 + 1e-5)),
            because=f"min(norm, limit) = {want} at rate 1, in float32 and on update {update} too",
        )
        check(
            "recorded norm",
            record.grad_norm,
            within=(norm * (1 - 1e-6), norm * (1 + 1e-6)),
            because="before clipping, whatever the number of microbatches; float32",
        )


@gate(
    claim="the norm of a tied model counts its shared table once",
    roles=["accumulate", "clip_grad_norm", "param_groups", "update_window"],
    not_claimed="several ranks",
    source="mindspore-ai/hyper-parallel#279: gradients counted twice in the norm",
)
def test_tied_norm(stack, rng, device, check):
    model = toys.tiny_model(stack, device, tied_head=True)
    window = toys.ragged_window(rng, (9, 0, 1, 4))
    _, want = toys.token_mean(model, window)
    training = TrainState(model, stack.param_groups(model, 0.1))
    settings = toys.plain_descent()
    record = stack.update_window(training, window.split(2).to(device), stack, settings)
    norm = float(toys.flat(want).norm())
    bound = max(toys.rounding(toys.working_dtype(stack)), 1e-6)
    check(
        "recorded norm / norm of the token mean",
        record.grad_norm / norm,
        within=(1 - bound, 1 + bound),
        because="the same gradient, its norm in float32 or wider; counting twice adds over 10 %",
    )


@gate(
    claim="the clip agrees with the reference over many shapes, limits and scales",
    roles=["clip_grad_norm"],
    not_claimed="gradients narrower than float32",
    source=SOURCE,
)
def test_against_reference(stack, rng, device, check, for_all):
    @for_all(
        norm=st.floats(1e-3, 1e3),
        max_norm=st.floats(1e-2, 1e2),
        max_examples=30,
    )
    def _(norm, max_norm):
        parameters = parameters_with(rng, device, norm)
        twins = [nn.Parameter(p.detach().cpu().double()) for p in parameters]
        for twin, parameter in zip(twins[:-1], parameters[:-1], strict=True):
            twin.grad = parameter.grad.detach().cpu().double()
        want = clip_grad_norm(twins, max_norm, None)
        got = stack.clip_grad_norm(parameters, max_norm, None)
        check("relative norm error", abs(float(got) / float(want) - 1), at_most=1e-6,
              because="float32 against float64")  # fmt: skip
        check(
            "relative gradient error",
            relative_error(gradient_of(parameters), gradient_of(twins)),
            at_most=1e-6 + 2e-6 / norm,
            because="float32, and the 1e-6 that torch adds to the norm",
        )
