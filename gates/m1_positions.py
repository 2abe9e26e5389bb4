"""M1. Rotary positions: relative, length-preserving, with exact angles up to long contexts."""

from __future__ import annotations

import pytest
import torch

from gates import probes, toys
from harness import gate
from harness.compare import relative_error

HEAD_WIDTH = 64
POSITIONS = [0, 1, 2, 64, 257, 512, 2047, 4096, 8191, 15962, 16383, 32767]
THETAS = pytest.mark.parametrize("theta", [1e4, 1e6], ids=["theta-1e4", "theta-1e6"])


def heads(rng, num_tokens, num_heads, rows=1):
    return torch.randn(rows, num_tokens, num_heads, HEAD_WIDTH, generator=rng, dtype=torch.float64)


def rotated(x_BTNH, positions_BT, theta):
    """The rotation as a product of complex numbers, in float64 on the CPU."""
    first, second = x_BTNH.cpu().double().chunk(2, dim=-1)
    frequency = theta ** -(torch.arange(HEAD_WIDTH // 2, dtype=torch.float64) * 2 / HEAD_WIDTH)
    angles = positions_BT.cpu().double()[..., None, None] * frequency
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1)


@gate(
    claim="the product of a rotated query and key depends on the difference of their positions "
    "alone, and no length changes, at positions up to 32767",
    roles=["rope"],
    not_claimed="which components are paired (test_values says it)",
    source="Su et al. 2021, equation 11; raiyanyahya/how-to-train-your-gpt#6: pairs and "
    "frequencies laid out differently",
)
@THETAS
def test_relative(stack, theta, rng, device, check):
    dtype = toys.working_dtype(stack)
    differences = [0, 1, 7, 100, 3000]
    starts = [0, 1, 64, 1000, 8192, 29_767]
    q, k = (heads(rng, 1, n).to(device, dtype).expand(-1, len(starts), -1, -1) for n in (4, 2))
    size = float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
    angle = 2 * max(POSITIONS) * torch.finfo(dtype).eps
    for difference in differences:
        positions = torch.tensor([starts], device=device)
        turned_q, _ = stack.rope(q, k, positions + difference, theta)
        _, turned_k = stack.rope(q, k, positions, theta)
        scores_BTK = (turned_q[:, :, :2] * turned_k).sum(-1)
        spread = (scores_BTK - scores_BTK[:, :1]).abs().max() / size
        check("change of q.k with both positions shifted", spread, at_most=4 * angle,
              because="angles are rounded at 2 * 32767 eps; a wrong layout gives 0.05")  # fmt: skip
        for name, x, y in (("q", q, turned_q), ("k", k, turned_k)):
            stretch = (y.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max()
            check(f"change of a length of {name}", stretch, at_most=64 * torch.finfo(dtype).eps,
                  because="cos^2 + sin^2 = 1; a wrong layout gives 0.05")  # fmt: skip


@gate(
    claim="queries and keys are rotated by positions * theta^(-2i/H) in pairs (i, i + H/2), with "
    "angles in float32 or better whatever the dtype, at any positions up to 32767",
    roles=["rope"],
    not_claimed="scaled frequencies for longer contexts",
    source="huggingface/candle PR#3520: position 15962 in bfloat16 is 15936 or 15968",
)
@THETAS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values(stack, dtype, theta, rng, device, check):
    if dtype == torch.float64:
        dtype = toys.working_dtype(stack)
    elif dtype == torch.bfloat16:
        dtype = toys.half_dtype(stack)
    order = torch.randperm(len(POSITIONS), generator=rng)
    positions_BT = torch.tensor([POSITIONS, POSITIONS])
    positions_BT[1] = positions_BT[1, order]  # rows differ, and a position is not an index
    q, k = (heads(rng, len(POSITIONS), n, rows=2).to(device, dtype) for n in (4, 2))
    turned = stack.rope(q, k, positions_BT.to(device), theta)
    wide = torch.promote_types(dtype, torch.float32)
    for name, x, y in zip("qk", (q, k), turned, strict=True):
        check(f"shape of {name}", list(y.shape), equal=list(x.shape), because="a rotation")
        check(f"dtype of {name}", str(y.dtype), equal=str(x.dtype), because="that of the input")
        error_BT = (y.cpu().double() - rotated(x, positions_BT, theta)).norm(dim=-1).amax(-1)
        error_BT /= x.cpu().double().norm(dim=-1).amin(-1)
        # An angle is off by its own rounding and that of its frequency; values by their dtype.
        bound_BT = 4 * torch.finfo(wide).eps * (positions_BT + 4)
        if dtype != wide:
            bound_BT = bound_BT + 2**-7
        excess = (error_BT / bound_BT).max()
        check(f"error of {name} over its bound", excess, at_most=1.0,
              because="angles rounded in float32 or better at every position; 2^-7 for values and "
              "tables in bfloat16")  # fmt: skip


@gate(
    claim="position 0 changes nothing, and the gradient is the inverse rotation",
    roles=["rope"],
    not_claimed="gradients of positions",
    source="a rotation is orthogonal: its transpose turns back",
)
def test_gradient(stack, rng, device, check):
    dtype = toys.working_dtype(stack)
    positions_BT = torch.tensor([[0, 3, 64, 900, 16_383]])
    q, k = (heads(rng, 5, n).to(device, dtype).requires_grad_() for n in (4, 2))
    turned = stack.rope(q, k, positions_BT.to(device), 1e4)
    bound = 4 * torch.finfo(dtype).eps * 16_383
    for name, x, y in zip("qk", (q, k), turned, strict=True):
        check(f"change of {name} at position 0", (y - x)[:, 0].abs().max(), equal=0.0,
              because="cos 0 = 1 and sin 0 = 0")  # fmt: skip
        cotangent = torch.randn(y.shape, generator=rng, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(y, x, cotangent.to(y), retain_graph=True)  # one node
        want = rotated(cotangent, -positions_BT, 1e4)
        check(f"relative error of d{name}", relative_error(gradient, want), at_most=bound,
              because="angles rounded at 16383 eps")  # fmt: skip


@gate(
    claim="the model uses the theta of its configuration and the positions it is given, not the "
    "index in the row",
    roles=["build_model", "rope"],
    not_claimed="positions beyond max_positions",
    source="lyogavin/airllm PR#369: theta of the configuration lost, 1e4 used",
)
@pytest.mark.parametrize("family", probes.FAMILIES)
def test_model(stack, family, rng, device, check):
    changes = {"rope_theta": 5e5} if family == "decoder" else {}
    model = probes.sharpened(probes.built(stack, family, device, rng, **changes), 2.0)
    input_ids = probes.random_ids(rng, 2, 12)
    positions = torch.stack([torch.randperm(64, generator=rng)[:12] for _ in range(2)])
    got = model(input_ids.to(device), positions.to(device))
    want = toys.oracle(model)(input_ids, positions)
    check("relative error", relative_error(got, want), at_most=64 * toys.rounding(got.dtype),
          because="the reference with the same parameters")  # fmt: skip
