"""M1. Attention is the softmax of scaled scores over the right keys, forward and backward."""

from __future__ import annotations

import pytest
import torch

from gates import probes, toys
from harness import gate
from harness.compare import relative_error

NUM_TOKENS = 19
HEADS = pytest.mark.parametrize(
    ("num_query_heads", "num_kv_heads"), [(8, 2), (6, 1), (3, 3)], ids=["8/2", "6/1", "3/3"]
)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["row", "packed"])


def explicit_attention(q_BTNH, k_BTKH, v_BTKH, visible_BTT):
    """The formula head by head, in float64 on the CPU."""
    q_BTNH, k_BTKH, v_BTKH = (x.cpu().double() for x in (q_BTNH, k_BTKH, v_BTKH))
    num_heads, head_width = q_BTNH.shape[2:]
    heads = []
    for n in range(num_heads):
        kv = n // (num_heads // k_BTKH.shape[2])
        scores_BTT = q_BTNH[:, :, n] @ k_BTKH[:, :, kv].mT / head_width**0.5
        weights_BTT = scores_BTT.masked_fill(~visible_BTT, -torch.inf).softmax(-1)
        heads.append(weights_BTT @ v_BTKH[:, :, kv])
    return torch.stack(heads, dim=2)


def random_case(stack, rng, device, num_query_heads, num_kv_heads, packed):
    inputs = [
        probes.random_heads(stack, rng, device, rows=2, tokens=NUM_TOKENS, heads=n, width=6)
        for n in (num_query_heads, num_kv_heads, num_kv_heads)
    ]
    documents_BT = torch.zeros(2, NUM_TOKENS, dtype=torch.int32)
    if packed:
        documents_BT = probes.documents_of([[5, 14], [18, 1]])
    return inputs, probes.visible(documents_BT), documents_BT.to(device) if packed else None


@gate(
    claim="attention has the values and the gradients of the formula, for shared and own kv heads",
    roles=["attention"],
    not_claimed="16-bit inputs, long rows, speed",
    source="Vaswani et al. 2017, equation 1; Ainslie et al. 2023, section 2.2",
)
@PACKED
@HEADS
def test_values(stack, num_query_heads, num_kv_heads, packed, rng, device, check):
    inputs, visible_BTT, documents = random_case(
        stack, rng, device, num_query_heads, num_kv_heads, packed
    )
    inputs = [(1.5 * x).requires_grad_() for x in inputs]
    oracle_inputs = [x.detach().cpu().double().requires_grad_() for x in inputs]
    want = explicit_attention(*oracle_inputs, visible_BTT)
    got = stack.attention(*inputs, documents)
    check("shape", list(got.shape), equal=list(want.shape), because="[B, T, N, H]")
    check("dtype", str(got.dtype), equal=str(inputs[0].dtype), because="that of the queries")
    bound = toys.rounding(got.dtype)
    because = "another order of the same sums"
    check("relative error", relative_error(got, want), at_most=bound, because=because)
    cotangent = torch.randn(want.shape, generator=rng, dtype=torch.float64)
    gradients = torch.autograd.grad(got, inputs, cotangent.to(got))
    oracle_gradients = torch.autograd.grad(want, oracle_inputs, cotangent)
    for name, gradient, oracle in zip("qkv", gradients, oracle_gradients, strict=True):
        check(f"relative error of d{name}", relative_error(gradient, oracle), at_most=bound,
              because=because)  # fmt: skip


@gate(
    claim="query head n reads kv head n // (N // K): 0 0 0 0 1 1 1 1 for 8 and 2 heads",
    roles=["attention"],
    not_claimed="how a checkpoint of another layout is converted",
    source="apple/axlearn PR#842: kv heads tiled (0 1 0 1) instead of repeated",
)
@HEADS
def test_heads(stack, num_query_heads, num_kv_heads, rng, device, check):
    (q, k, v), _, _ = random_case(stack, rng, device, num_query_heads, num_kv_heads, packed=False)
    v[:] = torch.arange(num_kv_heads, device=device)[None, None, :, None]  # v says which head
    o_BTNH = stack.attention(q, k, v, None)
    read = o_BTNH.double().mean((0, 1, 3)).round(decimals=6).tolist()
    group = num_query_heads // num_kv_heads
    check("kv head that each query head reads", read,
          equal=[float(n // group) for n in range(num_query_heads)],
          because="a weighted mean of equal values is that value")  # fmt: skip


@gate(
    claim="attention in bfloat16 is as near to the oracle as the reference formula in bfloat16",
    roles=["attention"],
    not_claimed="inputs recorded from training",
    source="error ratio to the plain formula; flash-attention's tests use a factor of 2",
)
def test_bfloat16(stack, rng, device, check):
    inputs, visible_BTT, _ = random_case(stack, rng, device, 8, 2, packed=False)
    inputs = [x.to(toys.half_dtype(stack)) for x in inputs]
    want = explicit_attention(*inputs, visible_BTT)
    got = stack.attention(*inputs, None)
    check("dtype", str(got.dtype), equal=str(inputs[0].dtype), because="that of the queries")
    check("relative error", relative_error(got, want), at_most=2 * 2**-8,
          because="the output is rounded to 2^-9; weights kept in bfloat16 may double it, scores "
          "in bfloat16 add 2^-9 of a score each")  # fmt: skip
