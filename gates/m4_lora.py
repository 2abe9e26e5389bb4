"""M4. LoRA: the base at the start, gradients for adapters alone, and one model when merged."""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import torch

from gates import probes, toys
from harness import gate
from harness.compare import error_ratio, max_abs_error, relative_error, worst_relative
from harness.contract import not_run
from reference.lora import PROJECTIONS
from reference.schedule import Schedule
from reference.update import TrainState, UpdateSettings

RANK, ALPHA = 3, 12.0  # alpha / rank is 4: neither 1, nor alpha, nor alpha / sqrt(rank)
TARGETS = {"decoder": PROJECTIONS, "chargpt": ("q_proj", "v_proj", "up_proj", "down_proj")}


def require_peft():
    """The verdict NOT_RUN where peft is missing."""
    if importlib.util.find_spec("peft") is None:
        not_run("peft is not installed; the reference makes adapters with it.")


def built(stack, family, compute, rng, device):
    """A base with random parameters: of the widest dtype, or float32 computing in bfloat16."""
    if compute == "own":
        return probes.built(stack, family, device, rng)
    dtype = toys.require_bfloat16(stack)
    return probes.built(stack, family, device, rng, compute_dtype=dtype).float()


def adapted(stack, base, family, seed=1):
    """A copy of the base with adapters: the contract names them `<matrix>.lora_A.`, `.lora_B.`."""
    require_peft()
    return stack.add_adapters(copy.deepcopy(base), RANK, ALPHA, TARGETS[family], seed)


def sides(model):
    """(A, B) of every adapter by the name of its matrix."""
    found = {}
    for name, parameter in model.named_parameters():
        for side in ("lora_A", "lora_B"):
            matrix, mark, _ = name.partition(f".{side}.")
            if mark:
                found.setdefault(matrix, {})[side] = parameter
    return {name: (pair["lora_A"], pair["lora_B"]) for name, pair in found.items()}


@torch.no_grad()
def moved(model, rng):
    """The model with random adapters, as if they had been trained."""
    for A, B in sides(model).values():
        for parameter in (A, B):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
    return model


@torch.no_grad()
def merged_by_formula(base, model):
    """The base in float64 on the CPU with W + alpha / rank * B A for every adapter."""
    twin = toys.oracle(base)
    for name, (A, B) in sides(model).items():
        update = B.detach().cpu().double() @ A.detach().cpu().double()
        twin.get_parameter(f"{name}.weight").add_(ALPHA / RANK * update)
    return twin


def matrices(base, targets):
    return [name for name, _ in base.named_modules() if name.rpartition(".")[2] in targets]


@gate(
    claim="with new adapters the model is its base, bit for bit, and each adapter can learn",
    roles=["add_adapters"],
    not_claimed="that other starts are worse",
    source="Hu et al. 2021, section 4.1: B = 0, A random; peft draws A as nn.Linear does",
)
@pytest.mark.parametrize("family", ["decoder", "chargpt"])
@pytest.mark.parametrize("compute", ["own", "bfloat16"])
def test_start(stack, family, compute, rng, device, check):
    base = built(stack, family, compute, rng, device)
    ids = probes.random_ids(rng, 2, 17).to(device)
    targets = [base.get_submodule(name) for name in matrices(base, TARGETS[family])]
    # What is watched is called by itself, as what is adapted is, and not in one call with others.
    watched = [matrix.register_forward_hook(lambda *_: None) for matrix in targets]
    want = base(ids)
    for handle in watched:
        handle.remove()
    model = adapted(stack, base, family)
    check("hidden states changed", max_abs_error(model(ids), want), equal=0.0, because="B is zero")
    found = sides(model)
    check("matrices with an adapter", sorted(found), equal=sorted(matrices(base, TARGETS[family])),
          because="those that were asked for, in every layer")  # fmt: skip
    for name, (A, B) in found.items():
        outputs, inputs = base.get_parameter(f"{name}.weight").shape
        check(f"shapes at {name}", [list(A.shape), list(B.shape)],
              equal=[[RANK, inputs], [outputs, RANK]], because="rank x I, O x rank")  # fmt: skip
        check("deviation of A x sqrt(3 x inputs)", A.std() * math.sqrt(3 * inputs),
              within=(0.7, 1.3), because="uniform within 1/sqrt(inputs); where A is zero too, "
              "neither ever gets a gradient")  # fmt: skip
    again, other = adapted(stack, base, family), adapted(stack, base, family, seed=2)
    first, same, different = (sides(m)[next(iter(found))][0] for m in (model, again, other))
    check("the same seed", torch.equal(first, same), equal=True, because="the seed decides A")
    check("another seed", torch.equal(first, different), equal=False, because="it decides A")


@gate(
    claim="only adapters get a gradient, the one that the formula has",
    roles=["add_adapters"],
    not_claimed="the activations' memory",
    source="chain rule: with W' = W + s B A, dB = s dW' A^T and dA = s B^T dW'; s = alpha / rank",
)
@pytest.mark.parametrize("family", ["decoder", "chargpt"])
def test_gradients(stack, family, rng, device, check):
    base = probes.built(stack, family, device, rng)
    model = moved(adapted(stack, base, family), rng)
    window = probes.labelled_window(rng, torch.zeros(2, 17, dtype=torch.int32))
    stack.accumulate(model, window.to(device), None)
    found = sides(model)
    adapters = {id(parameter) for pair in found.values() for parameter in pair}
    others = [
        n for n, p in model.named_parameters() if p.grad is not None and id(p) not in adapters
    ]
    check("frozen parameters with a gradient", others, equal=[], because="the base is not trained")
    _, dense = toys.token_mean(merged_by_formula(base, model), window)
    scale = ALPHA / RANK
    got, want = {}, {}
    for name, (A, B) in found.items():
        dW = dense[f"{name}.weight"]
        want[f"{name} A"] = scale * B.detach().cpu().double().T @ dW
        want[f"{name} B"] = scale * dW @ A.detach().cpu().double().T
        for side, parameter in (("A", A), ("B", B)):
            gradient = parameter.grad
            got[f"{name} {side}"] = torch.zeros_like(parameter) if gradient is None else gradient
    check("worst relative error of a gradient", worst_relative(got, want),
          at_most=toys.rounding(next(iter(got.values())).dtype),
          because="sums in another order")  # fmt: skip


@gate(
    claim="updates change every adapter and nothing else, and the optimizer holds adapters only",
    roles=["add_adapters", "param_groups", "optimizer_step", "update_window"],
    not_claimed="speed of learning",
    source="Hu et al. 2021: no optimizer state for frozen weights; a frozen matrix with weight "
    "decay would shrink",
)
@pytest.mark.parametrize("compute", ["own", "bfloat16"])
def test_updates(stack, compute, rng, device, check):
    base = built(stack, "decoder", compute, rng, device).float()
    model = adapted(stack, base, "decoder")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = UpdateSettings(Schedule(peak=1e-2, total_tokens=10_000))
    training = TrainState(model, stack.param_groups(model, settings.weight_decay))
    window = probes.labelled_window(rng, torch.zeros(2, 17, dtype=torch.int32)).to(device)
    adapters = {id(parameter) for pair in sides(model).values() for parameter in pair}
    held = [id(p) for group in training.groups for p in group["params"]]
    check("parameters that the optimizer holds and should not", len(set(held) - adapters), equal=0,
          because="they are frozen")  # fmt: skip
    check("adapters that the optimizer does not hold", len(adapters - set(held)), equal=0,
          because="they are trained")  # fmt: skip
    for _ in range(3):  # in the first, A gets no gradient: B is zero
        stack.update_window(training, window, stack, settings)
    check("parameters with moments", len(training.optimizer_state), equal=len(adapters),
          because="two moments for each A and each B")  # fmt: skip
    moments = {str(s.first_moment.dtype) for s in training.optimizer_state.values()}
    check("dtypes of moments", sorted(moments), equal=["torch.float32"], because="of adapters")
    moving = {name for name, p in model.named_parameters() if id(p) in adapters}
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    check("frozen tensors that changed", sorted(changed - moving), equal=[], because="frozen")
    check("adapters that did not change", sorted(moving - changed), equal=[],
          because="after three updates B, and through it A, has had a gradient")  # fmt: skip


@gate(
    claim="the merged model is W + alpha / rank * B A, under the base's own names, trained whole",
    roles=["add_adapters", "merge_adapters"],
    not_claimed="taking a merged adapter out again",
    source="Hu et al. 2021, section 4.1: no cost after merging",
)
@pytest.mark.parametrize("family", ["decoder", "chargpt"])
@pytest.mark.parametrize("compute", ["own", "bfloat16"])
def test_merge(stack, family, compute, rng, device, check):
    base = built(stack, family, compute, rng, device)
    model = moved(adapted(stack, base, family), rng)
    ids = probes.random_ids(rng, 2, 17)
    oracle = merged_by_formula(base, model)
    unmerged = model(ids.to(device)).detach()
    merged = stack.merge_adapters(model)
    check("names", sorted(merged.state_dict()) == sorted(base.state_dict()), equal=True,
          because="it can be saved as the model that it is")  # fmt: skip
    state, want = merged.state_dict(), oracle.state_dict()
    eps = torch.finfo(base.lm_head.weight.dtype).eps
    check("worst relative error of a weight", worst_relative(state, want), at_most=16 * eps,
          because="a product of rank 3 and one sum")  # fmt: skip
    frozen = [name for name, p in merged.named_parameters() if not p.requires_grad]
    check("parameters still frozen", frozen, equal=[], because="nothing is an adapter any more")
    with torch.no_grad():
        exact = oracle(ids)
        plain = copy.deepcopy(base)
        plain.load_state_dict({name: t.to(base.lm_head.weight) for name, t in want.items()})
        rounded = plain(ids.to(device))
        for name, got in (("merged", merged(ids.to(device))), ("unmerged", unmerged)):
            if compute == "own":
                error, bound = relative_error(got, exact), toys.rounding(got.dtype)
                check(f"{name}: relative error of the hidden states", error, at_most=bound,
                      because="another order of sums")  # fmt: skip
            else:
                check(f"{name}: error over that of the formula", error_ratio(got, rounded, exact),
                      at_most=2.0, because="the same bfloat16 roundings, and one more a projection "
                      "while unmerged")  # fmt: skip
