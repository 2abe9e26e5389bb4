"""M4. Rotary positions in every dtype: values and gradients at small and very large positions."""

from __future__ import annotations

import pytest
import torch

from gates import ladder, operators, recorded
from gates.operator_cases import rope_case
from harness import gate

FAR = [15_962, 16_383, 32_767, 4_095]
# On a CPU each pair of heads and width costs a candidate a compiler run.
CPU_WIDTHS = {(7, 1): (16,), (6, 2): (64,), (3, 3): (16,)}
WIDTHS = (16, 64, 96, 128, 200)


def positions_at(rng, rows, tokens, largest):
    """Positions [B, T] in no order; rows differ."""
    return torch.randint(largest + 1, (rows, tokens), generator=rng)


@gate(
    claim="rotated queries and keys and their gradients are as near to the oracle as the plain "
    "formula, for tokens around every tile edge, any number of heads, positions in no order",
    roles=["rope"],
    not_claimed="positions beyond 32767, scaled frequencies, memory layouts (m4_memory)",
    source="raiyanyahya/how-to-train-your-gpt#6 (pairs), huggingface/candle PR#3520 (positions in "
    "16 bits)",
)
@pytest.mark.parametrize("heads", [(7, 1), (6, 2), (3, 3)], ids=["7/1", "6/2", "3/3"])
def test_shapes(stack, heads, rng, device, check):
    for dtype in operators.dtypes(stack):
        for width in CPU_WIDTHS[heads] if device.type == "cpu" else WIDTHS:
            for tokens in (1, 15, 16, 17, 63, 64, 65, 129) if width == 64 else (1, 17):
                positions_BT = positions_at(rng, 2, tokens, largest=63)
                case = rope_case(rng, positions_BT, *heads, width)
                at = f"[2, {tokens}, {heads}, {width}]"
                operators.trial(stack, case, dtype, device, rng, check, at=at)


@gate(
    claim="angles are as exact as float32 allows at positions up to 32767, in 16-bit formats too, "
    "forward and backward",
    roles=["rope"],
    not_claimed="angles in float64",
    source="EleutherAI/gpt-neox#1003: tables in half precision are off by 0.78 at 2048; "
    "huggingface/candle PR#3520: position 15962 becomes 15936 or 15968",
)
@pytest.mark.parametrize("theta", [1e4, 1e6], ids=["theta-1e4", "theta-1e6"])
def test_far_positions(stack, theta, rng, device, check):
    positions_BT = torch.tensor([[0, 1, 2, 257, 2047, *FAR], [*FAR, 512, 0, 8191, 3, 1]])
    for dtype in operators.dtypes(stack):
        case = rope_case(rng, positions_BT, 6, 2, 64, theta)
        outcome, oracle = far_outcomes(stack, case, dtype, device, rng)
        eps = torch.finfo(dtype).eps
        # An angle of 32767 is off by half a unit itself, and by that of its frequency.
        bound_BT = 2 * eps + 4 * torch.finfo(torch.float32).eps * (positions_BT + 4)
        for name, got in outcome.items():
            error_BT = (got.detach().cpu().double() - oracle[name]).norm(dim=-1).amax(-1)
            excess = (error_BT / oracle[name].norm(dim=-1).amax(-1) / bound_BT).max()
            check(f"{operators.short(dtype)} {name}: error over its bound", excess, at_most=1.0,
                  because="values rounded once or twice, angles in float32; a table of bfloat16 "
                  "frequencies is off by 2 at 4096")  # fmt: skip


def far_outcomes(stack, case, dtype, device, rng):
    """Outputs and gradients by name, of the role on trial and of the oracle."""
    tensors = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
    forward = operators.forward_of(case, stack.rope, tensors)
    cotangents, _ = operators.cotangents_of(case, forward, rng)
    backward = operators.backward_of(forward, tensors, cotangents)
    _, oracle = operators.references(case, dtype, tensors, cotangents)
    return forward | backward, {
        name: x.detach() for name, x in (oracle.forward | oracle.backward).items()
    }


@gate(
    claim="the same at the heads and theta of the rung's model, and for real queries and keys",
    roles=["rope"],
    not_claimed="the rung's number of tokens",
    source="the presets of reference.config",
)
@pytest.mark.parametrize("inputs", ["rung", "recorded"])
def test_models(stack, inputs, rung, rng, device, check):
    def rung_case(config):
        heads = config.num_query_heads, config.num_kv_heads, config.head_width
        positions = positions_at(rng, 2, 33, largest=31)
        return rope_case(rng, positions, *heads, config.rope_theta)

    def rung_cases():
        return [rung_case(config) for config in ladder.operator_configs(rung)]

    recorded.trials("rope", inputs, rung_cases, stack, rng, device, check)
