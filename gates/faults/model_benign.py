"""Other right models, attentions, norms and activations: what the M1 gates must accept."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from gates.faults.attention import attend, visible
from harness import benign

ATTENTION_GATES = [
    "m1_causality::test_operator",
    "m1_causality::test_replaced_future",
    "m1_causality::test_nothing_is_forgotten",
    "m1_causality::test_layers",
    "m1_documents::test_operator",
    "m1_documents::test_operator_alone",
    "m1_documents::test_ids_are_names",
    "m1_documents::test_replaced_document",
    "m1_documents::test_document_alone",
    "m1_documents::test_padding",
    "m1_attention::test_values",
    "m1_attention::test_heads",
    "m1_attention::test_bfloat16",
    "m1_model::test_values_and_gradients",
]
NORM_GATES = [
    "m1_norm::test_values",
    "m1_norm::test_one_rounding",
    "m1_norm::test_gradient",
    "m1_norm::test_zero_row",
    "m1_model::test_values_and_gradients",
]


@benign(role="attention", accepted_by=ATTENTION_GATES, because="the formula, step by step")
def takes_an_explicit_softmax(reference):
    """Scores, -inf, softmax and product one after the other in the heads' own dtype."""

    def attention(q, k, v, documents):
        may_see = visible(q, documents)
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -math.inf))

    return attention


@benign(
    role="attention",
    accepted_by=ATTENTION_GATES,
    because="no score of a model is as low as the lowest finite number",
)
def fills_with_the_lowest_number(reference):
    """Masks with the lowest finite number of the dtype."""

    def attention(q, k, v, documents):
        may_see, lowest = visible(q, documents), torch.finfo(q.dtype).min
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, lowest))

    return attention


@benign(
    role="attention",
    accepted_by=ATTENTION_GATES,
    because="a softmax may be rescaled as its maximum grows (Milakov and Gimelshein 2018)",
)
def meets_keys_block_by_block(reference):
    """An online softmax over blocks of 5 keys."""

    def attention(q, k, v, documents):
        may_see, group = visible(q, documents), q.shape[2] // k.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        q_, k_, v_ = (x.to(wide).transpose(1, 2) for x in (q, k, v))
        k_, v_ = (x.repeat_interleave(group, dim=1) for x in (k_, v_))
        largest = torch.full_like(q_[..., :1], -1e300 if wide == torch.float64 else -1e30)
        total, output = torch.zeros_like(largest), torch.zeros_like(q_)
        for start in range(0, k_.shape[2], 5):
            block = slice(start, start + 5)
            scores = q_ @ k_[:, :, block].mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(~may_see[..., block], -math.inf)
            new = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
            weights, shrink = (scores - new).exp(), (largest - new).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            output = output * shrink + weights @ v_[:, :, block]
            largest = new
        return (output / total).transpose(1, 2).to(q.dtype)

    return attention


@benign(role="attention", accepted_by=ATTENTION_GATES, because="documents do not see each other")
def takes_one_document_at_a_time(reference):
    """No document mask at all: every document by itself."""

    def attention(q, k, v, documents):
        if documents is None:
            return reference.attention(q, k, v, None)
        rows = []
        for row, ids in enumerate(documents):
            _, lengths = torch.unique_consecutive(ids, return_counts=True)
            parts = [x[row : row + 1].split(lengths.tolist(), dim=1) for x in (q, k, v)]
            spans = [reference.attention(*part, None) for part in zip(*parts, strict=True)]
            rows.append(torch.cat(spans, dim=1))
        return torch.cat(rows)

    return attention


@benign(
    role="attention", accepted_by=ATTENTION_GATES, because="query head n of group n // (N // K)"
)
def groups_query_heads_in_a_product(reference):
    """Grouped queries by an einsum, without repeating keys and values."""

    def attention(q, k, v, documents):
        batch, tokens, num_heads, width = q.shape
        grouped = q.reshape(batch, tokens, k.shape[2], num_heads // k.shape[2], width)
        scores = torch.einsum("btkgh,bskh->bkgts", grouped, k) / width**0.5
        scores = scores.masked_fill(~visible(q, documents)[:, :, None], -math.inf)
        return torch.einsum("bkgts,bskh->btkgh", scores.softmax(-1), v).reshape(q.shape)

    return attention


@benign(role="rms_norm", accepted_by=NORM_GATES, because="torch's own operator, in wide numbers")
def calls_torch_s_rms_norm(reference):
    """torch.nn.functional.rms_norm of the input in float32 or better."""

    def rms_norm(x, weight, eps):
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)

    return rms_norm


@benign(role="rms_norm", accepted_by=NORM_GATES, because="another order of the same operations")
def multiplies_by_the_gain_first(reference):
    """(x * weight) / rms(x), with the mean square as a scaled norm."""

    def rms_norm(x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = (wide * wide).sum(-1, keepdim=True) * (1 / x.shape[-1])
        return (wide * weight.to(wide.dtype) / (mean_square + eps).sqrt()).to(x.dtype)

    return rms_norm


@benign(
    role="swiglu",
    accepted_by=["m1_operators::test_swiglu", "m1_model::test_values_and_gradients"],
    because="silu(z) is z sigmoid(z)",
)
def multiplies_by_a_sigmoid(reference):
    """gate * (sigmoid(gate) * up)."""
    return lambda gate, up: gate * (torch.sigmoid(gate) * up)


@benign(
    role="linear",
    accepted_by=["m1_operators::test_linear", "m1_model::test_values_and_gradients"],
    because="sums over two halves of the input are the sum",
)
def sums_two_halves_of_the_input(reference):
    """A product split along the summed dimension."""

    def linear(x, weight, bias):
        half = x.shape[-1] // 2
        first = F.linear(x[..., :half], weight[:, :half], bias)
        return first + F.linear(x[..., half:], weight[:, half:])

    return linear


@benign(
    role="build_model",
    accepted_by=[
        "m1_tied::test_same_memory",
        "m1_tied::test_counted_once",
        "m1_tied::test_gradient_is_the_sum",
        "m1_initialization::test_first_loss",
        "m1_initialization::test_draws",
        "m1_initialization::test_every_parameter_has_a_gradient",
        "m1_initialization::test_every_parameter_moves",
        "m1_one_step::test_one_update",
        "m1_model::test_values_and_gradients",
    ],
    because="the draws are independent, whatever their order",
)
def draws_the_layers_from_last_to_first(reference):
    """The same distributions in another order."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        for layer in reversed(model.layers):
            for module in layer.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        return model

    return build_model
