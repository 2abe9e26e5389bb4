"""Attention kernels whose backward is wrong: for one width, for large scores, in padded rows."""

from __future__ import annotations

import math

import torch

from gates.faults.attention import visible
from gates.faults.kernels import wide
from harness import fault

ATTENTION = "m4_attention::"
SHAPES, DOCUMENTS = f"{ATTENTION}test_shapes", f"{ATTENTION}test_documents"
SCORES, SHORT = f"{ATTENTION}test_large_scores", f"{ATTENTION}test_short_rows"


def heads_first(x, group=1):
    """[B, T, heads, H] as float32 [B, heads * group, T, H]."""
    return wide(x).transpose(1, 2).repeat_interleave(group, dim=1)


def weights_of(q, k, may_see):
    """Softmax weights [B, N, T, T] in float32."""
    scores = heads_first(q) @ heads_first(k, q.shape[2] // k.shape[2]).mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~may_see, -math.inf).softmax(-1)


def right_values(q, k, v, may_see):
    o = weights_of(q, k, may_see) @ heads_first(v, q.shape[2] // v.shape[2])
    return o.transpose(1, 2).to(q.dtype)


def wide_gradients(q, k, v, may_see, do, delta=None):
    """dq, dk, dv [B, N, T, H] in float32, of every query head; `delta` is sum(dp p) over keys."""
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    p, do_ = weights_of(q, k, may_see), heads_first(do)
    dp = do_ @ heads_first(v, group).mT
    delta = (dp * p).sum(-1, keepdim=True) if delta is None else delta
    ds = p * (dp - delta) * scale
    return ds @ heads_first(k, group), ds.mT @ heads_first(q), p.mT @ do_


def stored(gradients, q, k):
    """Gradients of heads as those of q, k and v: heads of a group are added."""
    dq, *of_keys = gradients
    dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2).transpose(1, 2) for x in of_keys)
    return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(k.dtype)


def right_gradients(q, k, v, may_see, do):
    return stored(wide_gradients(q, k, v, may_see, do), q, k)


def attention_kernel(values=right_values, gradients=right_gradients, mask=visible):
    """Attention with its forward and its backward by hand."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, may_see):
            ctx.save_for_backward(q, k, v, may_see)
            return values(q, k, v, may_see)

        @staticmethod
        def backward(ctx, do):
            return *gradients(*ctx.saved_tensors, do), None

    return lambda q, k, v, documents: Kernel.apply(q, k, v, mask(q, documents))


# --- backward ------------------------------------------------------------------------------------


def with_gradients(change):
    """change(gradients [B, N, T, H] of q, k and v, q, k, v, may_see) after a right backward."""

    def gradients(q, k, v, may_see, do):
        changed = change(wide_gradients(q, k, v, may_see, do), q, k, v, may_see)
        return stored(changed, q, k)

    return attention_kernel(gradients=gradients)


@fault(
    role="attention",
    caught_by=[f"{SHAPES}[6/2]", DOCUMENTS],
    seen_in="Dao-AILab/flash-attention#2623",
)
def scales_dq_for_one_head_width(reference):
    """The forward is right; dq is 200 times too large for a head width of 64."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        return dq * (200 if q.shape[-1] == 64 else 1), dk, dv

    return with_gradients(change)


@fault(
    role="attention",
    caught_by=[SCORES, f"{ATTENTION}test_models[recorded]"],
    seen_in="NVIDIA/TransformerEngine#3216",
)
def loses_dq_of_large_scores(reference):
    """dq is wrong where a score is beyond 12: Gaussian inputs have none."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        scores = heads_first(q) @ heads_first(k, q.shape[2] // k.shape[2]).mT
        large = (scores * q.shape[-1] ** -0.5).abs().amax(-1, keepdim=True) > 12
        return torch.where(large, 5 * dq, dq), dk, dv

    return with_gradients(change)


@fault(
    role="attention",
    caught_by=[f"{SHAPES}[6/2]", DOCUMENTS],
    seen_in="XunhaoLai/native-sparse-attention-triton#27",
)
def splits_heads_by_the_size_of_the_group(reference):
    """Backward: head n is taken for (n // K, n % K) where (n // group, n % group) was meant."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        num_kv_heads = k.shape[2]
        dk, dv = (
            x.unflatten(1, (-1, num_kv_heads)).transpose(1, 2).flatten(1, 2) for x in (dk, dv)
        )
        return dq, dk, dv

    return with_gradients(change)


@fault(
    role="attention",
    caught_by=[SHAPES, "m4_memory::test_guards[attention]"],
    seen_in="tile-ai/tilelang PR#2461",
)
def leaves_scratch_of_padded_rows_unwritten(reference):
    """Rows of a last tile of 32 have no row sum; zero times what was there goes into dk."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        missing = -q.shape[1] % 32
        scratch = torch.empty(missing, q.shape[-1], dtype=dk.dtype, device=q.device)
        return dq, dk + (0 * scratch).sum(), dv

    return with_gradients(change)


@fault(
    role="attention",
    caught_by=[f"{SHORT}[1]", f"{SHORT}[one-token]"],
    seen_in="Dao-AILab/flash-attention#334",
)
def divides_by_the_other_keys(reference):
    """dq is divided by the sum of the other weights, which is none for one key."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        others = may_see.sum(-1, keepdim=True) - 1
        return dq * others / others, dk, dv

    return with_gradients(change)


@fault(
    role="attention",
    caught_by=[f"{DOCUMENTS}[many]", f"{DOCUMENTS}[beside-edges]"],
    seen_in="MinghuasLab/flash-attention-npu#44",
)
def inflates_dk_of_one_segment(reference):
    """dk of every document's last token but the last document's is 1e3 times too large."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        ends = torch.diagonal(may_see, -1, dim1=-2, dim2=-1).logical_not()  # [B, 1, T - 1]
        ends = torch.nn.functional.pad(ends, (0, 1))[..., None]
        return dq, torch.where(ends, 1e3 * dk, dk), dv

    return with_gradients(change)


@fault(role="attention", caught_by=[SHAPES, SCORES], seen_in="own")
def keeps_weights_in_8_bits_backward(reference):
    """Weights are saved in float8 for dv."""

    def gradients(q, k, v, may_see, do):
        dq, dk, _ = wide_gradients(q, k, v, may_see, do)
        p = weights_of(q, k, may_see).to(torch.float8_e4m3fn).float()
        return stored((dq, dk, p.mT @ heads_first(do)), q, k)

    return attention_kernel(gradients=gradients)


@fault(role="attention", caught_by=f"{SHAPES}[6/2]", seen_in="tile-ai/tilelang#2382")
def stores_half_of_the_bits_of_dq(reference):
    """float32 is stored in 16-bit memory as it is: every element is half of a float32."""

    def gradients(q, k, v, may_see, do):
        wide_dq, *others = wide_gradients(q, k, v, may_see, do)
        dq, dk, dv = stored((wide_dq, *others), q, k)
        if q.dtype in (torch.bfloat16, torch.float16):
            as_float32 = wide_dq.transpose(1, 2).float().contiguous()
            dq = as_float32.view(q.dtype).flatten()[: q.numel()].view(q.shape)
        return dq, dk, dv

    return attention_kernel(gradients=gradients)


@fault(
    role="attention",
    caught_by=f"{SHAPES}[6/2]",
    seen_in="XunhaoLai/native-sparse-attention-triton#27",
)
def adds_up_slots_that_no_head_wrote(reference):
    """dk and dv: a head's slot is its number over the number of groups, so that slots are shared,
    others keep what memory held, and all are added.
    """

    def gradients(q, k, v, may_see, do):
        dq, *of_keys = wide_gradients(q, k, v, may_see, do)
        num_groups, heads = k.shape[2], q.shape[2]
        slots = torch.arange(heads, device=q.device) // num_groups * num_groups
        summed = []
        for of_heads in of_keys:
            written = torch.empty(of_heads.shape, dtype=of_heads.dtype, device=q.device)
            written[:, slots] = of_heads
            summed.append(written)
        return stored((dq, *summed), q, k)

    return attention_kernel(gradients=gradients)
