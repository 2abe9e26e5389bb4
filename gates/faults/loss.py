"""Wrong losses, and other right ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from harness import benign, fault
from reference.loss import NO_TARGET

LOSS = "m1_loss::"
VALUES, NOTHING, FOREIGN = (
    f"{LOSS}test_values",
    f"{LOSS}test_no_target",
    f"{LOSS}test_foreign_label",
)
EVERYWHERE = [VALUES, NOTHING, f"{LOSS}test_bfloat16"]


def wide_logits(hidden, weight):
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(dtype) @ weight.to(hidden.dtype).to(dtype).T


@fault(role="token_nll", caught_by=VALUES, seen_in="huggingface/transformers PR#34191")
def returns_the_mean(reference):
    """A mean over the targets where a sum was promised."""

    def token_nll(hidden, weight, labels):
        nll_sum, num_tokens = reference.token_nll(hidden, weight, labels)
        return nll_sum / num_tokens.clamp(min=1), num_tokens

    return token_nll


@fault(
    role="token_nll",
    caught_by=[VALUES, f"{NOTHING}[ignored]"],
    seen_in="vllm-project/speculators PR#942",
)
def counts_every_token(reference):
    """Counts all rows, those without a target too."""

    def token_nll(hidden, weight, labels):
        nll_sum, _ = reference.token_nll(hidden, weight, labels)
        return nll_sum, torch.tensor(labels.numel(), device=labels.device)

    return token_nll


@fault(role="token_nll", caught_by=NOTHING, seen_in="pytorch/pytorch#70348")
def divides_by_no_target(reference):
    """A masked mean times the count: 0 / 0 where nothing is a target."""

    def token_nll(hidden, weight, labels):
        nll_sum, num_tokens = reference.token_nll(hidden, weight, labels)
        return nll_sum / num_tokens * num_tokens, num_tokens

    return token_nll


@fault(role="token_nll", caught_by=[VALUES, f"{NOTHING}[ignored]"], seen_in="own")
def trains_ignored_tokens_on_token_0(reference):
    """Clamps -100 to 0 and forgets to mask it."""

    def token_nll(hidden, weight, labels):
        nll_sum, _ = reference.token_nll(hidden, weight, labels.clamp(min=0))
        return nll_sum, (labels != NO_TARGET).sum()

    return token_nll


@fault(
    role="token_nll",
    caught_by=f"{LOSS}test_bfloat16",
    seen_in="Modalities/modalities PR#464",
)
def takes_the_softmax_of_16_bit_logits(reference):
    """No cast to float32 between the logits and the loss."""

    def token_nll(hidden, weight, labels):
        logits = F.linear(hidden, weight.to(hidden.dtype))
        nll = F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_TARGET)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return nll.to(wide).sum(), (labels != NO_TARGET).sum()

    return token_nll


@fault(role="token_nll", caught_by=VALUES, seen_in="verl-project/verl#2899")
def counts_padded_columns(reference):
    """The vocabulary is padded to a multiple of 128 with logits of 0."""

    def token_nll(hidden, weight, labels):
        padded = F.pad(weight, (0, 0, 0, -len(weight) % 128))
        return reference.token_nll(hidden, padded, labels)

    return token_nll


@fault(role="token_nll", caught_by=VALUES, seen_in="own")
def ignores_the_gradient_from_above(reference):
    """Gradients are made in the forward and handed out whatever the loss is multiplied by."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
                nll_sum, num_tokens = reference.token_nll(*inputs, labels)
            ctx.save_for_backward(*torch.autograd.grad(nll_sum, inputs))
            ctx.mark_non_differentiable(num_tokens)
            return nll_sum.detach(), num_tokens

        @staticmethod
        def backward(ctx, upstream, _):
            return *ctx.saved_tensors, None

    return Fused.apply


@fault(role="token_nll", caught_by=f"{VALUES}[logits-30-down]", seen_in="own")
def exponentiates_without_a_shift(reference):
    """log(sum(exp(logits)) + 1e-6): harmless near 0, wrong for logits far below."""

    def token_nll(hidden, weight, labels):
        logits = wide_logits(hidden, weight)
        is_target = labels != NO_TARGET
        chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        nll = (logits.exp().sum(-1) + 1e-6).log() - chosen
        return (nll * is_target).sum(), is_target.sum()

    return token_nll


@fault(role="token_nll", caught_by=FOREIGN, seen_in="mlfoundations/open_lm PR#77")
def takes_labels_modulo_the_vocabulary(reference):
    """Makes a token of any label."""

    def token_nll(hidden, weight, labels):
        inside = torch.where(labels == NO_TARGET, NO_TARGET, labels % len(weight))
        return reference.token_nll(hidden, weight, inside)

    return token_nll


@fault(role="token_nll", caught_by=[f"{FOREIGN}[-1]", f"{FOREIGN}[-101]"], seen_in="own")
def ignores_every_negative_label(reference):
    """Takes any negative label for no target."""

    def token_nll(hidden, weight, labels):
        return reference.token_nll(hidden, weight, torch.where(labels < 0, NO_TARGET, labels))

    return token_nll


@benign(role="token_nll", accepted_by=EVERYWHERE, because="sums over chunks of rows are sums")
def takes_rows_in_chunks(reference):
    """Never holds the logits of more than 8 rows."""

    def token_nll(hidden, weight, labels):
        if len(labels) == 0:
            return reference.token_nll(hidden, weight, labels)
        chunks = zip(hidden.split(8), labels.split(8), strict=True)
        parts = [reference.token_nll(h, weight, chunk) for h, chunk in chunks]
        sums, counts = zip(*parts, strict=True)
        return torch.stack(sums).sum(), torch.stack(counts).sum()

    return token_nll


@benign(role="token_nll", accepted_by=EVERYWHERE, because="rows without a target add nothing")
def selects_the_targets_first(reference):
    """Logits only where there is a target."""

    def token_nll(hidden, weight, labels):
        is_target = labels != NO_TARGET
        return reference.token_nll(hidden[is_target], weight, labels[is_target])

    return token_nll


@benign(
    role="token_nll",
    accepted_by=EVERYWHERE,
    because="the matrix product may round its result once; the softmax is in float32",
)
def rounds_logits_to_the_hidden_dtype(reference):
    """A 16-bit matrix product, cast to float32 before the loss, as transformers does."""

    def token_nll(hidden, weight, labels):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden, weight.to(hidden.dtype)).to(wide)
        nll_sum = F.cross_entropy(logits, labels, reduction="sum", ignore_index=NO_TARGET)
        return nll_sum, (labels != NO_TARGET).sum()

    return token_nll
