"""Operators that race, spoil a graph that is kept, or quietly do not run."""

from __future__ import annotations

import itertools

import torch

from gates.faults.attention_kernels import attention_kernel, stored, wide_gradients
from gates.faults.kernels import wide, writes_beyond
from gates.faults.linear_kernels import linear_kernel, product
from gates.faults.norm_kernels import norm_kernel, parts_of
from gates.faults.swiglu_kernels import right_gradients as swiglu_gradients
from gates.faults.swiglu_kernels import right_values as swiglu_values
from gates.faults.swiglu_kernels import swiglu_kernel
from harness import fault
from reference.loss import NO_TARGET

REPEATS, MEMORY = "m4_repeats::", "m4_memory::"
BITS, DEFAULT = f"{REPEATS}test_same_bits", f"{REPEATS}test_default_mode"
SECOND = f"{REPEATS}test_second_backward"


# --- races ---------------------------------------------------------------------------------------


@fault(role="rms_norm", caught_by=[f"{BITS}[rms_norm]"], seen_in="own")
def adds_rows_in_any_order(reference):
    """Atomic additions to dweight: the order of the rows changes from run to run."""

    def gradients(x, weight, eps, dy):
        dx, rows = parts_of(x, weight, eps, dy)
        order = torch.randperm(len(rows), device=x.device)
        total = torch.zeros_like(rows[0])
        for row in rows[order]:
            total = total + row
        return dx.to(x.dtype), total.to(weight.dtype)

    return norm_kernel(gradients=gradients)


@fault(
    role="attention",
    caught_by=f"{BITS}[attention]",
    seen_in="Dao-AILab/flash-attention#414",
)
def adds_blocks_of_dq_in_any_order(reference):
    """dq is added up by atomics over blocks of keys, also where determinism was asked for."""

    def gradients(q, k, v, may_see, do):
        dq, dk, dv = wide_gradients(q, k, v, may_see, do)
        parts = dq[None] * torch.rand(8, 1, 1, 1, 1, device=q.device).softmax(0)
        return stored((parts.sum(0), dk, dv), q, k)

    return attention_kernel(gradients=gradients)


@fault(
    role="linear",
    caught_by=[f"{BITS}[linear]", f"{DEFAULT}[linear]"],
    seen_in="tile-ai/tilelang#2556",
)
def loses_a_barrier(reference):
    """Now and then a tile is multiplied before its last 16 columns have arrived."""
    calls = itertools.count()

    def forward(a, b):
        late = next(calls) % 7 == 6
        return product(a[:, :-16], b[:, :-16]) if late else product(a, b)

    return linear_kernel(forward)


@fault(
    role="token_nll",
    caught_by=[f"{BITS}[token_nll]", f"{DEFAULT}[token_nll]"],
    seen_in="tile-ai/tilelang#2699",
)
def clears_the_accumulator_too_late(reference):
    """Every fifth run starts from what the run before left."""
    left = [torch.zeros(()), itertools.count()]

    def token_nll(hidden, weight, labels):
        nll_sum, num_tokens = reference.token_nll(hidden, weight, labels)
        stale = left[0].to(nll_sum) if next(left[1]) % 5 == 4 else 0
        left[0] = nll_sum.detach()
        return nll_sum + stale, num_tokens

    return token_nll


@fault(role="swiglu", caught_by=[f"{BITS}[swiglu]", f"{DEFAULT}[swiglu]"], seen_in="own")
def reads_a_tile_that_another_block_still_writes(reference):
    """Some elements hold the gate instead of the product, others every time."""

    def values(gate, up):
        early = torch.rand(gate.shape, device=gate.device) < 0.01
        return torch.where(early, gate, swiglu_values(gate, up))

    return swiglu_kernel(values)


# --- retained graphs -----------------------------------------------------------------------------


@fault(
    role="token_nll",
    caught_by=f"{SECOND}[token_nll]",
    seen_in="linkedin/Liger-Kernel: fused_linear_cross_entropy_backward",
)
def scales_its_only_gradients(reference):
    """The forward keeps the gradients, and each backward multiplies them in place."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
            with torch.enable_grad():
                nll_sum = reference.token_nll(*inputs, labels)[0]
            ctx.gradients = torch.autograd.grad(nll_sum, inputs)
            return nll_sum.detach()

        @staticmethod
        def backward(ctx, upstream):
            return *(x.mul_(upstream) for x in ctx.gradients), None

    return lambda hidden, weight, labels: (
        Kernel.apply(hidden, weight, labels),
        (labels != NO_TARGET).sum(),
    )


@fault(
    role="swiglu",
    caught_by=[f"{SECOND}[swiglu]", f"{MEMORY}test_layouts[swiglu]"],
    seen_in="linkedin/Liger-Kernel: LigerSiLUMulFunction",
)
def stores_gradients_over_its_inputs(reference):
    """Saves memory: dgate takes the place of gate, dup that of up."""

    def gradients(gate, up, dh):
        for x, dx in zip((gate, up), swiglu_gradients(gate, up, dh), strict=True):
            x.data.copy_(dx)  # as a kernel writes: no version is counted
        return gate.detach(), up.detach()

    return swiglu_kernel(gradients=gradients)


@fault(role="linear", caught_by=f"{SECOND}[linear]", seen_in="own")
def gives_one_buffer_away_twice(reference):
    """dx stands in a buffer that the next backward fills again."""
    buffers: dict[tuple, torch.Tensor] = {}

    def dx(dy, weight):
        found = product(dy, weight)
        return buffers.setdefault((found.shape, found.dtype), found).copy_(found)

    return linear_kernel(dx=dx)


# --- kernels that do not run ---------------------------------------------------------------------


def never_launching(reference, role):
    """The plain formula under the flag of a kernel that is never launched."""
    plain = getattr(reference, role)

    def quiet(*arguments):
        return plain(*arguments)

    quiet.kernel_calls = lambda: {f"{role}_forward": 0, f"{role}_backward": 0}
    return quiet


@fault(
    role="swiglu",
    caught_by=f"{REPEATS}test_kernels_ran[swiglu]",
    seen_in="verl-project/verl PR#6330",
)
def falls_back_without_a_word(reference):
    """The flag of the fused kernel is set; plain torch runs."""
    return never_launching(reference, "swiglu")


@fault(
    role="attention",
    caught_by=f"{REPEATS}test_kernels_ran[attention]",
    seen_in="feifeibear/long-context-attention#166",
)
def runs_its_kernel_forward_only(reference):
    """A kernel of inference: the backward is plain torch."""
    launches = itertools.count()
    seen = [0]

    def attention(q, k, v, documents):
        seen[0] = next(launches) + 1
        return reference.attention(q, k, v, documents)

    attention.kernel_calls = lambda: {"attention_forward": seen[0]}
    return attention


# --- memory of the other roles -------------------------------------------------------------------


@fault(role="linear", caught_by=f"{MEMORY}test_guards[linear]", seen_in="own")
def stores_one_element_behind_the_product(reference):
    """The product is right, and the element behind it is written too."""
    return linear_kernel(lambda a, b: writes_beyond(product(a, b)))


@fault(
    role="swiglu", caught_by=f"{MEMORY}test_guards[swiglu]", seen_in="tile-ai/tilelang-ascend#1654"
)
def stores_whole_vectors(reference):
    """The output is right, and the vector is stored to its end."""
    return swiglu_kernel(lambda gate, up: writes_beyond(swiglu_values(gate, up)))


@fault(role="attention", caught_by=f"{MEMORY}test_guards[attention]", seen_in="own")
def stores_a_row_sum_too_many(reference):
    """The output is right; the log-sum-exp of a row beyond the last is stored as well."""

    def attention(q, k, v, documents):
        writes_beyond(wide(q[..., 0]).detach())
        return reference.attention(q, k, v, documents)

    return attention
