"""Wrong attention: what a query sees of the row, and what it makes of it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from harness import fault

CAUSALITY, ATTENTION = "m1_causality::", "m1_attention::"
LARGE_SCORES = [
    f"{CAUSALITY}test_operator[scores-1e5-row]",
    f"{CAUSALITY}test_operator[scores-1e5-packed]",
    f"{CAUSALITY}test_replaced_future[scores-1e5-row]",
    f"{CAUSALITY}test_replaced_future[scores-1e5-packed]",
    f"{CAUSALITY}test_layers",
    "m1_documents::test_operator[scores-1e5]",
]
ROW_SUMS = f"{ATTENTION}test_values"


def visible(q_BTNH, documents_BT):
    """[B or 1, 1, T, T]: what a query may see."""
    num_tokens = q_BTNH.shape[1]
    ones = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=q_BTNH.device)
    if documents_BT is None:
        return ones.tril()
    return ones.tril() & (documents_BT[:, :, None] == documents_BT[:, None, :])[:, None]


def attend(q_BTNH, k_BTKH, v_BTKH, masked, scale=None):
    """softmax(masked(scores)) v with every step in sight; masked maps scores [B, N, T, T]."""
    group = q_BTNH.shape[2] // k_BTKH.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores_BNTT = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (masked(scores_BNTT).softmax(-1) @ v).transpose(1, 2)


def seeing(changed):
    """An attention in which changed(visible, position differences [T, T]) may be seen."""

    def attention(q, k, v, documents):
        index = torch.arange(q.shape[1], device=q.device)
        may_see = changed(visible(q, documents), index[:, None] - index)
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -math.inf))

    return attention


@fault(role="attention", caught_by=LARGE_SCORES, seen_in="karpathy/minGPT#75")
def fills_the_mask_with_minus_ten_thousand(reference):
    """Masks with a finite -1e4, which learned scores can beat."""

    def attention(q, k, v, documents):
        may_see = visible(q, documents)
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -1e4))

    return attention


@fault(role="attention", caught_by=LARGE_SCORES, seen_in="huggingface/transformers#17121")
def adds_minus_ten_thousand(reference):
    """Adds -1e4 to masked scores instead of replacing them."""

    def attention(q, k, v, documents):
        bias = -1e4 * (~visible(q, documents)).to(q.dtype)
        return attend(q, k, v, lambda scores: scores + bias)

    return attention


@fault(
    role="attention",
    caught_by=[f"{CAUSALITY}test_nothing_is_forgotten[row]", f"{ATTENTION}test_values[8/2-row]"],
    seen_in="pytorch/pytorch#103082",
)
def aligns_each_chunk_of_queries_to_the_first_key(reference):
    """Takes the queries in two chunks under a causal flag that is aligned top-left."""

    def attention(q, k, v, documents):
        if documents is not None:
            return reference.attention(q, k, v, documents)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        half = q.shape[2] // 2
        chunks = [
            F.scaled_dot_product_attention(chunk, k, v, is_causal=True, enable_gqa=True)
            for chunk in (q[:, :, :half], q[:, :, half:])
        ]
        return torch.cat(chunks, dim=2).transpose(1, 2)

    return attention


@fault(
    role="attention",
    caught_by=[f"{CAUSALITY}test_nothing_is_forgotten[row]", f"{ATTENTION}test_values[8/2-row]"],
    seen_in="huggingface/transformers#39408",
)
def counts_a_window_of_one_key_less(reference):
    """Sees T - 1 keys where T were meant: the last query loses the first token."""
    return seeing(lambda may_see, distance: may_see & (distance < distance.shape[0] - 1))


@fault(
    role="attention",
    caught_by=[
        f"{CAUSALITY}test_operator",
        f"{CAUSALITY}test_replaced_future",
        f"{CAUSALITY}test_layers",
        ROW_SUMS,
    ],
    seen_in="own",
)
def sees_one_key_ahead(reference):
    """Compares with <= one further: every query sees the token it must predict."""
    return seeing(lambda may_see, distance: may_see | (distance == -1))


@fault(
    role="attention",
    caught_by=[f"{CAUSALITY}test_nothing_is_forgotten", ROW_SUMS],
    seen_in="own",
)
def does_not_see_itself(reference):
    """A strict triangle; only a query without any other key sees itself."""

    def changed(may_see, distance):
        strict = may_see & (distance > 0)
        return torch.where(strict.any(-1, keepdim=True), strict, may_see & (distance == 0))

    return seeing(changed)


@fault(
    role="attention",
    caught_by=[
        f"{CAUSALITY}test_operator",
        f"{CAUSALITY}test_replaced_future",
        f"{CAUSALITY}test_layers",
        f"{CAUSALITY}test_random_tokens_stay_unpredicted",
        ROW_SUMS,
    ],
    seen_in="huggingface/transformers#48745",
)
def has_no_causal_mask(reference):
    """Attends to the whole document, the future included."""

    def attention(q, k, v, documents):
        zeros = torch.zeros(q.shape[:2], device=q.device) if documents is None else documents
        may_see = (zeros[:, :, None] == zeros[:, None, :])[:, None]
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -math.inf))

    return attention


@fault(
    role="attention",
    caught_by=[f"{CAUSALITY}test_operator", "m1_one_step::test_one_update"],
    seen_in="huggingface/transformers#31673",
)
def multiplies_minus_infinity_by_a_triangle(reference):
    """Makes the mask as -inf * triangle: 0 * -inf is NaN where a query may see."""

    def attention(q, k, v, documents):
        bias = -math.inf * (~visible(q, documents)).to(q.dtype)
        return attend(q, k, v, lambda scores: scores + bias)

    return attention


@fault(
    role="attention",
    caught_by=["m1_one_step::test_one_update", f"{CAUSALITY}test_nothing_is_forgotten"],
    seen_in="pytorch/pytorch#41508",
)
def leaves_the_first_token_nothing_to_see(reference):
    """A strict triangle filled with -inf: the first row of a document is NaN."""
    return seeing(lambda may_see, distance: may_see & (distance > 0))


@fault(
    role="attention",
    caught_by=[
        f"{ATTENTION}test_heads[8/2]",
        f"{ATTENTION}test_values[8/2-row]",
        f"{ATTENTION}test_values[8/2-packed]",
        f"{ATTENTION}test_bfloat16",
        "m1_model::test_values_and_gradients[decoder]",
    ],
    seen_in="apple/axlearn PR#842",
)
def tiles_the_kv_heads(reference):
    """Query heads read kv heads 0 1 0 1 ... instead of 0 0 ... 1 1."""

    def attention(q, k, v, documents):
        group = q.shape[2] // k.shape[2]
        return reference.attention(q, k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1), documents)

    return attention


@fault(
    role="attention",
    caught_by=[ROW_SUMS, "m1_model::test_values_and_gradients"],
    seen_in="own",
)
def divides_scores_by_the_head_width(reference):
    """Scales by 1 / H instead of 1 / sqrt(H)."""

    def attention(q, k, v, documents):
        return reference.attention(q * q.shape[-1] ** -0.5, k, v, documents)

    return attention


@fault(role="attention", caught_by=[ROW_SUMS, f"{ATTENTION}test_bfloat16"], seen_in="own")
def keeps_scores_in_8_bits(reference):
    """Rounds scores to float8 before the softmax."""

    def attention(q, k, v, documents):
        may_see = visible(q, documents)

        def masked(scores):
            rounded = scores.detach().float().to(torch.float8_e4m3fn).to(scores.dtype)
            straight_through = scores + (rounded - scores).detach()
            return straight_through.masked_fill(~may_see, -math.inf)

        return attend(q, k, v, masked)

    return attention


@fault(
    role="attention",
    caught_by=[f"{ATTENTION}test_values[8/2-row]", f"{ATTENTION}test_values[6/1-row]"],
    seen_in="own",
)
def returns_dk_of_one_head_a_group(reference):
    """The forward is right; the gradient of k sums only the first query head of each group."""

    def attention(q, k, v, documents):
        group = q.shape[2] // k.shape[2]
        own = torch.arange(q.shape[2], device=q.device) % group == 0
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        k = torch.where(own[:, None], k, k.detach())
        return reference.attention(q, k, v, documents)

    return attention


@fault(
    role="attention",
    caught_by=[
        "m1_initialization::test_every_parameter_has_a_gradient",
        "m1_initialization::test_every_parameter_moves",
        "m1_one_step::test_one_update",
        "m1_model::test_values_and_gradients",
    ],
    seen_in="feifeibear/long-context-attention#166",
)
def has_no_backward(reference):
    """An operator of inference: its output is cut off from q, k and v."""
    return lambda q, k, v, documents: reference.attention(q, k, v, documents).detach()
