"""M4. RMSNorm, alone and with the residual addition, forward and backward, in every dtype."""

from __future__ import annotations

import pytest
import torch

from gates import ladder, operators, recorded
from gates.operator_cases import EPSILON, add_norm_case, norm_case
from harness import gate

CASES = {"rms_norm": norm_case, "add_rms_norm": add_norm_case}
ROLE = pytest.mark.parametrize("role", CASES)
# Rows around the edges of tiles of 16, 32, 64 and 128, and primes. Partial sums of the gain's
# gradient are over rows: a block of them that is lost shows in the primes.
ROWS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 257)
FEW_ROWS = (1, 3, 17)
# On a CPU each width costs a compiler run; the GPU takes warps and blocks apart.
WIDTHS = {"cpu": (33, 64), "cuda": (17, 31, 32, 33, 64, 100, 128, 896, 1000, 1536, 4096, 8192)}


@gate(
    claim="the norm and its gradients are as near to the oracle as the plain formula, for numbers "
    "of rows and widths around every tile edge",
    roles=["rms_norm", "add_rms_norm"],
    not_claimed="memory layouts (m4_memory), float64 (m1_norm), speed",
    source="BobMcDear/attorch#18 (the last block of rows lost), tile-ai/tilelang#2599 (widths that "
    "are no multiple of a warp)",
)
@ROLE
def test_shapes(stack, role, rng, device, check):
    widths = WIDTHS.get(device.type, WIDTHS["cuda"])
    for dtype in operators.dtypes(stack):
        for width in widths:
            for rows in ROWS if width == 64 else FEW_ROWS:
                case = CASES[role](rng, rows, width)
                operators.trial(stack, case, dtype, device, rng, check, at=f"[{rows}, {width}]")


@gate(
    claim="the same at the width of the rung's model, and for what norms read in a real model",
    roles=["rms_norm", "add_rms_norm"],
    not_claimed="the rung's number of tokens",
    source="the presets of reference.config; NVIDIA/TransformerEngine#3216: random inputs do not "
    "show what real activations do",
)
@pytest.mark.parametrize("inputs", ["rung", "recorded"])
@ROLE
def test_models(stack, role, inputs, rung, rng, device, check):
    def rung_cases():
        widths = [config.model_width for config in ladder.operator_configs(rung)]
        return [CASES[role](rng, 67, width) for width in widths]

    recorded.trials(role, inputs, rung_cases, stack, rng, device, check)


@gate(
    claim="rows of any size: squares beyond the range of float16, means at epsilon, a row of zeros",
    roles=["rms_norm", "add_rms_norm"],
    not_claimed="rows whose squares overflow float32",
    source="huggingface/candle PR#3526; float16 ends at 65504, and 300 squared is 90000",
)
@pytest.mark.parametrize("scale", [300.0, 1e-3], ids=["300", "0.001"])
@ROLE
def test_sizes(stack, role, scale, rng, device, check):
    for dtype in operators.dtypes(stack):
        case = CASES[role](rng, 37, 64, scale / 4)
        # dx is dy / rms: at 0.001 it would leave the range of float16.
        operators.trial(stack, case, dtype, device, rng, check, scale=2.0**-6)
        for x in case.tensors.values():
            x[..., :] = x if x.ndim == 1 else 0.0
        tensors = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
        forward = operators.forward_of(case, getattr(stack, role), tensors)
        name = f"{operators.short(dtype)} rows of zeros"
        check(f"{name}: largest output", forward["y"].detach().abs().max(), equal=0.0,
              because="0 * gain")  # fmt: skip
        (dx,) = torch.autograd.grad(
            forward["y"], tensors["x"], torch.full_like(forward["y"], 2.0**-6)
        )
        want = tensors["weight"].detach().double() * 2.0**-6 / EPSILON**0.5
        error = ((dx.double() - want) / want).abs().max()
        check(f"{name}: relative error of dx", error, at_most=operators.ABSOLUTE[dtype],
              because="gain / sqrt(0 + eps): 1000 times the gain")  # fmt: skip


@gate(
    claim="16-bit outputs are the exact values rounded once, of a gain in 32 bits too",
    roles=["rms_norm", "add_rms_norm"],
    not_claimed="gradients rounded once",
    source="google/gemma_pytorch PR#67; ggml-org/llama.cpp PR#5810; the contract of add_rms_norm: "
    "what is normalised is the rounded total",
)
@pytest.mark.parametrize("gain", ["gain-16", "gain-32"])
@ROLE
def test_one_rounding(stack, role, gain, rng, device, check):
    for dtype in operators.dtypes(stack):
        case = CASES[role](rng, 257, 64)
        if gain == "gain-32":
            case.dtypes["weight"] = torch.float32
        got = operators.trial(stack, case, dtype, device, rng, check)
        if dtype == torch.float32:
            continue
        tensors = {
            n: x.to(device, case.dtypes.get(n, dtype)).cpu().double()
            for n, x in case.tensors.items()
        }
        role_in_float64 = case.oracle(dtype) if case.oracle else operators.ROLES[role]
        want = operators.forward_of(case, role_in_float64, tensors)
        for name, y in got.forward.items():
            differing = (y.detach().cpu() != want[name].to(dtype)).double().mean()
            check(f"{operators.short(dtype)} {name}: share that is not the nearest", differing,
                  at_most=0.01, because="float32 crosses a tie in 1 of 1000 in bfloat16; a second "
                  "rounding moves 24 %")  # fmt: skip
