"""Attention kernels that are wrong in a block, a head group, a document or the backward."""

from __future__ import annotations

import math

import torch

from gates.faults.attention import visible
from gates.faults.kernels import densely, wide
from harness import benign, fault

ATTENTION = "m4_attention::"
SHAPES, DOCUMENTS = f"{ATTENTION}test_shapes", f"{ATTENTION}test_documents"
SCORES, SHORT = f"{ATTENTION}test_large_scores", f"{ATTENTION}test_short_rows"
ISOLATION = f"{ATTENTION}test_isolation"


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


def wide_gradients(q, k, v, may_see, do):
    """dq, dk, dv [B, N, T, H] in float32, of every query head."""
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    p, do_ = weights_of(q, k, may_see), heads_first(do)
    dp = do_ @ heads_first(v, group).mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
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


@fault(role="attention", caught_by=[SHAPES, DOCUMENTS], seen_in="Dao-AILab/flash-attention#2623")
def scales_dq_for_one_head_width(reference):
    """The forward is right; dq is 200 times too large for a head width of 64."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        return dq * (200 if q.shape[-1] == 64 else 1), dk, dv

    return with_gradients(change)


@fault(role="attention", caught_by=SCORES, seen_in="NVIDIA/TransformerEngine#3216")
def loses_dq_of_large_scores(reference):
    """dq is wrong where a score is beyond 30: Gaussian inputs have none."""

    def change(gradients, q, k, v, may_see):
        dq, dk, dv = gradients
        scores = heads_first(q) @ heads_first(k, q.shape[2] // k.shape[2]).mT
        large = (scores * q.shape[-1] ** -0.5).abs().amax(-1, keepdim=True) > 30
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


# --- which keys are seen -------------------------------------------------------------------------


@fault(role="attention", caught_by=SHAPES, seen_in="ml-explore/mlx PR#2836")
def aligns_each_chunk_of_queries_to_the_last_key(reference):
    """Queries come in chunks of 64 under a causal mask that is aligned to the last key."""

    def mask(q, documents):
        tokens = torch.arange(q.shape[1], device=q.device)
        ends = (tokens // 64 * 64 + 64).clamp(max=q.shape[1])
        shift = q.shape[1] - ends  # a chunk's last query would see the row's last key
        seen = tokens[None, :] <= (tokens + shift)[:, None]
        return visible(q, documents).any(-1, keepdim=True) & seen

    return attention_kernel(mask=mask)


@fault(role="attention", caught_by=DOCUMENTS, seen_in="tile-ai/tilelang#1266")
def knows_two_documents_a_row(reference):
    """The loop over documents has a built-in end: from the third on they are one."""

    def mask(q, documents):
        if documents is not None:
            starts = torch.nn.functional.pad((documents.diff(dim=1) != 0).int(), (1, 0))
            documents = starts.cumsum(1).clamp(max=1)
        return visible(q, documents)

    return attention_kernel(mask=mask)


@fault(role="attention", caught_by=DOCUMENTS, seen_in="huggingface/diffusers#14380")
def takes_the_first_row_s_documents(reference):
    """The documents of row 0 are those of every row."""
    return attention_kernel(
        mask=lambda q, documents: visible(q, None if documents is None else documents[:1])
    )


@fault(
    role="attention",
    caught_by=[f"{DOCUMENTS}[many]", f"{DOCUMENTS}[beside-edges]"],
    seen_in="own",
)
def skips_blocks_by_their_first_token(reference):
    """A block of 16 keys is skipped if its first token is of another document."""

    def mask(q, documents):
        may_see = visible(q, documents)
        if documents is None:
            return may_see
        first = torch.arange(q.shape[1], device=q.device) // 16 * 16
        seen = documents[:, :, None] == documents[:, first][:, None, :]
        own_block = first[:, None] == first[None, :]
        return may_see & (seen | own_block)[:, None]

    return attention_kernel(mask=mask)


@fault(
    role="attention",
    caught_by=[f"{DOCUMENTS}[many]", f"{DOCUMENTS}[beside-edges]"],
    seen_in="own",
)
def takes_ids_for_sorted(reference):
    """A key is skipped if its document's id is smaller, and seen if it is larger."""

    def mask(q, documents):
        if documents is None:
            return visible(q, None)
        return visible(q, None) & (documents[:, :, None] <= documents[:, None, :])[:, None]

    return attention_kernel(mask=mask)


@fault(role="attention", caught_by=[SHAPES, DOCUMENTS], seen_in="own")
def drops_the_last_keys(reference):
    """Keys after the last whole tile of 16 are seen by nobody but themselves."""

    def mask(q, documents):
        tokens = torch.arange(q.shape[1], device=q.device)
        whole = tokens < q.shape[1] // 16 * 16
        return visible(q, documents) & (whole[None, :] | (tokens[:, None] == tokens[None, :]))

    return attention_kernel(mask=mask)


@fault(role="attention", caught_by=ISOLATION, seen_in="pytorch/pytorch#41508")
def adds_a_large_negative_number(reference):
    """Masked scores are -1e9 lower instead of minus infinity: a key of 1e30 outweighs it."""

    def values(q, k, v, may_see):
        scores = heads_first(q) @ heads_first(k, q.shape[2] // k.shape[2]).mT * q.shape[-1] ** -0.5
        p = (scores - 2e3 * ~may_see).softmax(-1)
        o = p @ heads_first(v, q.shape[2] // v.shape[2])
        return o.transpose(1, 2).to(q.dtype)

    return attention_kernel(values)


@fault(role="attention", caught_by=ISOLATION, seen_in="own")
def multiplies_weights_by_the_mask(reference):
    """Unmasked exponentials times zero: a score of 1e30 makes 0 * inf, or the maximum of all."""

    def values(q, k, v, may_see):
        scores = heads_first(q) @ heads_first(k, q.shape[2] // k.shape[2]).mT * q.shape[-1] ** -0.5
        e = (scores - scores.amax(-1, keepdim=True)).exp() * may_see
        p = e / e.sum(-1, keepdim=True).clamp(min=1e-30)
        o = p @ heads_first(v, q.shape[2] // v.shape[2])
        return o.transpose(1, 2).to(q.dtype)

    return attention_kernel(values)


@fault(
    role="attention",
    caught_by="m4_memory::test_layouts[attention]",
    seen_in="pytorch/pytorch#191937",
)
def reads_expanded_keys_as_dense(reference):
    """Keys and values are read as dense memory, also where one row stands for all."""
    return attention_kernel(
        lambda q, k, v, may_see: right_values(q, densely(k), densely(v), may_see)
    )


# --- other right ones ----------------------------------------------------------------------------

EVERY_ATTENTION_GATE = [
    SHAPES,
    DOCUMENTS,
    SCORES,
    SHORT,
    ISOLATION,
    f"{ATTENTION}test_models[rung]",
    "m4_memory::test_layouts[attention]",
    "m4_memory::test_guards[attention]",
    "m4_repeats::test_same_bits[attention]",
]


@benign(role="attention", accepted_by=EVERY_ATTENTION_GATE, because="the formulas of the gradients")
def has_a_backward_by_hand(reference):
    """Forward and backward by hand, weights computed again."""
    return attention_kernel()


@benign(
    role="attention",
    accepted_by=EVERY_ATTENTION_GATE,
    because="a tensor core takes weights in the dtype of the values; their sum stays in float32",
)
def rounds_weights_before_the_second_product(reference):
    """Weights are rounded to the values' dtype once, as flash attention does."""

    def rounded(p, dtype):
        return p.to(dtype).to(p.dtype)

    def values(q, k, v, may_see):
        p = rounded(weights_of(q, k, may_see), v.dtype)
        return (p @ heads_first(v, q.shape[2] // v.shape[2])).transpose(1, 2).to(q.dtype)

    def gradients(q, k, v, may_see, do):
        group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        p, do_ = weights_of(q, k, may_see), heads_first(do)
        dp = do_ @ heads_first(v, group).mT
        ds = rounded(p * (dp - (dp * p).sum(-1, keepdim=True)), q.dtype) * scale
        of_heads = ds @ heads_first(k, group), ds.mT @ heads_first(q), rounded(p, q.dtype).mT @ do_
        return stored(of_heads, q, k)

    return attention_kernel(values, gradients)


@benign(
    role="attention",
    accepted_by=EVERY_ATTENTION_GATE,
    because="an output may lie in memory as it likes (pytorch/pytorch#133671: a false alarm)",
)
def returns_heads_outermost_in_memory(reference):
    """The output is a transposed view."""

    def attention(q, k, v, documents):
        o = reference.attention(q, k, v, documents)
        return o.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    return attention
