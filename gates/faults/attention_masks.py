"""Attention kernels that see the wrong keys, or see the right ones through a wrong mask."""

from __future__ import annotations

import torch

from gates.faults.attention import visible
from gates.faults.attention_kernels import (
    ATTENTION,
    DOCUMENTS,
    SHAPES,
    attention_kernel,
    heads_first,
    right_values,
)
from gates.faults.kernels import densely
from harness import fault

ISOLATION = f"{ATTENTION}test_isolation"


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


@fault(
    role="attention",
    caught_by=[DOCUMENTS, f"{ATTENTION}test_models[rung]"],
    seen_in="tile-ai/tilelang#1266",
)
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


def values_of_dense_keys(q, k, v, may_see):
    """The forward of a kernel that takes k and v for contiguous."""
    return right_values(q, densely(k), densely(v), may_see)


@fault(
    role="attention",
    caught_by=["m4_memory::test_layouts[attention]", "m4_memory::test_expanded_heads"],
    seen_in="pytorch/pytorch#191937",
)
def reads_expanded_keys_as_dense(reference):
    """Keys and values are read as dense memory, also where one row stands for all."""
    return attention_kernel(values_of_dense_keys)


@fault(
    role="attention",
    caught_by="m4_memory::test_expanded_heads[documents]",
    seen_in="pytorch/pytorch#191937",
)
def reads_expanded_keys_as_dense_beside_a_mask(reference):
    """Without documents all is right; with them keys and values are read as dense memory."""
    masked = attention_kernel(values_of_dense_keys)

    def attention(q, k, v, documents):
        return (reference.attention if documents is None else masked)(q, k, v, documents)

    return attention
