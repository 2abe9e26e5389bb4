"""Fused losses that are wrong in a tail, a precision, an offset, or for ignored rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gates.faults.kernels import densely, wide
from harness import fault
from reference.loss import NO_TARGET

LOSS = "m4_token_nll::"
SHAPES, LOGITS, IGNORED = f"{LOSS}test_shapes", f"{LOSS}test_logits", f"{LOSS}test_ignored"
PEAKS = f"{LOSS}test_peaks"
SUMS, RUNG = f"{LOSS}test_gradients_sum_to_zero", f"{LOSS}test_models[rung]"


def right_logits(hidden, weight):
    return wide(hidden) @ wide(weight).mT


def right_values(logits, labels):
    """The loss of every row, zero where there is no target."""
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_TARGET)


def right_slopes(logits, labels):
    """d nll / d logits [M, V]."""
    is_target = labels != NO_TARGET
    chosen = F.one_hot(labels.clamp(min=0), logits.shape[1])
    return (logits.softmax(-1) - chosen) * is_target[:, None]


def right_products(slopes, hidden, weight, upstream):
    dhidden = slopes @ wide(weight) * upstream
    dweight = slopes.mT @ wide(hidden) * upstream
    return dhidden.to(hidden.dtype), dweight.to(weight.dtype)


def loss_kernel(
    logits=right_logits, values=right_values, slopes=right_slopes, products=right_products
):
    """token_nll with its forward and its backward by hand."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            ctx.save_for_backward(hidden, weight, labels)
            return values(logits(hidden, weight), labels).sum()

        @staticmethod
        def backward(ctx, upstream):
            hidden, weight, labels = ctx.saved_tensors
            slopes_MV = slopes(logits(hidden, weight), labels)
            return *products(slopes_MV, hidden, weight, upstream), None

    def token_nll(hidden, weight, labels):
        weight = weight.to(hidden.dtype)
        return Kernel.apply(hidden, weight, labels), (labels != NO_TARGET).sum()

    return token_nll


# --- vocabulary ----------------------------------------------------------------------------------


def padded(logits, multiple=128):
    """Logits with columns of zero up to a multiple."""
    return F.pad(logits, (0, -logits.shape[1] % multiple))


@fault(role="token_nll", caught_by=[SHAPES, f"{LOGITS}[mean-8-down]", f"{LOGITS}[mean-20-down]"],
       seen_in="verl-project/verl#2899")  # fmt: skip
def counts_padded_columns_as_zero_logits(reference):
    """Columns after the last tile of 128 count exp(0): 1.02 nats at a mean of -8."""
    return loss_kernel(values=lambda logits, labels: right_values(padded(logits), labels))


@fault(
    role="token_nll",
    caught_by=[f"{LOGITS}[mean-8-down]", f"{LOGITS}[mean-20-down]"],
    seen_in="verl-project/verl#2899",
)
def counts_padded_columns_backward(reference):
    """The forward is right; the backward's softmax is over the padded columns too."""

    def slopes(logits, labels):
        return right_slopes(padded(logits), labels)[:, : logits.shape[1]]

    return loss_kernel(slopes=slopes)


@fault(
    role="token_nll",
    caught_by=[SHAPES, f"{IGNORED}[half]", RUNG],
    seen_in="vllm-project/speculators PR#993",
)
def drops_columns_beyond_the_largest_block(reference):
    """One block of 128 columns: the sum of exponentials ends there."""

    def values(logits, labels):
        chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        nll = logits[:, :128].logsumexp(-1) - chosen
        return nll * (labels != NO_TARGET)

    return loss_kernel(values=values)


@fault(role="token_nll", caught_by=[SHAPES, RUNG], seen_in="fastai/fastai PR#1814")
def smooths_labels_a_little(reference):
    """A thousandth of the probability is asked of all other tokens."""

    def values(logits, labels):
        return F.cross_entropy(
            logits, labels, reduction="none", ignore_index=NO_TARGET, label_smoothing=1e-3
        )

    return loss_kernel(values=values)


# --- precision -----------------------------------------------------------------------------------


@fault(role="token_nll", caught_by=[SHAPES, LOGITS], seen_in="google-deepmind/optax#1020")
def takes_the_loss_of_16_bit_logits(reference):
    """Log-softmax and loss in the dtype of the hidden states."""

    def token_nll(hidden, weight, labels):
        logits = (wide(hidden) @ wide(weight.to(hidden.dtype)).mT).to(hidden.dtype)
        return right_values(logits, labels).sum(dtype=torch.float32), (labels != NO_TARGET).sum()

    return token_nll


@fault(role="token_nll", caught_by=f"{SUMS}[logits-200]", seen_in="marin-community/marin PR#8217")
def takes_the_log_sum_exp_of_16_bit_logits(reference):
    """Backward: exp(logits in 32 bits - log-sum-exp of the logits as the hidden states' dtype has
    them): no softmax in 16 bits. In float32 it is right.
    """

    def token_nll(hidden, weight, labels):
        def slopes(logits, labels):
            narrow = logits.to(hidden.dtype).to(logits.dtype)
            p = (logits - narrow.logsumexp(-1, keepdim=True)).exp()
            chosen = F.one_hot(labels.clamp(min=0), logits.shape[1])
            return (p - chosen) * (labels != NO_TARGET)[:, None]

        return loss_kernel(slopes=slopes)(hidden, weight, labels)

    return token_nll


@fault(role="token_nll", caught_by=f"{LOGITS}[up-to-600]", seen_in="own")
def exponentiates_logits_as_they_are(reference):
    """log(sum(exp(logits))) without a shift: infinite from 89 on."""

    def values(logits, labels):
        chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return (logits.exp().sum(-1).log() - chosen) * (labels != NO_TARGET)

    return loss_kernel(values=values)


@fault(role="token_nll", caught_by=[SHAPES, f"{IGNORED}[half]"], seen_in="own")
def adds_up_dweight_over_chunks_in_8_bits(reference):
    """dweight is kept in float8 from chunk to chunk of 16 rows."""

    def products(slopes, hidden, weight, upstream):
        dhidden, _ = right_products(slopes, hidden, weight, upstream)
        total = torch.zeros_like(weight, dtype=torch.float32)
        for rows in torch.arange(len(hidden), device=hidden.device).split(16):
            part = slopes[rows].mT @ wide(hidden[rows])
            total = (total + part).to(torch.float8_e4m3fn).float()
        return dhidden, (total * upstream).to(weight.dtype)

    return loss_kernel(products=products)


# --- an estimate of the largest logit ------------------------------------------------------------


def over_the_estimate(logits):
    """Logits less the largest of the first 16, as an estimate of the row's."""
    return logits - logits[:, :16].amax(-1, keepdim=True)


@fault(role="token_nll", caught_by=[f"{PEAKS}[60.0]", f"{PEAKS}[300.0]"], seen_in="own")
def clamps_the_sum_of_exponentials_at_the_estimate(reference):
    """The loss takes what lies 15 nats above the estimate to lie there."""

    def values(logits, labels):
        return right_values(over_the_estimate(logits).clamp(max=15.0), labels)

    return loss_kernel(values=values)


def from_exponentials(exponentials):
    """A backward with the slopes of softmax(z) = e / sum(e)."""

    def slopes(logits, labels):
        e = exponentials(logits)
        chosen = F.one_hot(labels.clamp(min=0), logits.shape[1])
        return (e / e.sum(-1, keepdim=True) - chosen) * (labels != NO_TARGET)[:, None]

    return loss_kernel(slopes=slopes)


@fault(role="token_nll", caught_by=f"{PEAKS}[300.0]", seen_in="own")
def trusts_an_estimate_of_the_largest_logit(reference):
    """exp(z - estimate) overflows float32 where a later logit is 89 above it."""
    return from_exponentials(lambda logits: over_the_estimate(logits).float().exp())


@fault(role="token_nll", caught_by=[f"{PEAKS}[60.0]", f"{PEAKS}[300.0]"], seen_in="own")
def clamps_what_is_far_above_the_estimate(reference):
    """Nothing overflows, and all that lies 15 nats above the estimate is equally likely."""
    return from_exponentials(lambda logits: over_the_estimate(logits).clamp(max=15.0).exp())


@fault(role="token_nll", caught_by=PEAKS, seen_in="own")
def forgets_the_other_tiles_of_a_row_with_a_peak(reference):
    """The tile of 16 with the peak gets a base of its own, the others keep the estimate."""

    def exponentials(logits):
        tiles = padded(over_the_estimate(logits), 16).unflatten(-1, (-1, 16))
        base = tiles.amax(-1, keepdim=True)
        e = (tiles - torch.where(base > 10.0, base, 0.0)).exp()
        return e.flatten(1)[:, : logits.shape[1]]

    return from_exponentials(exponentials)


# --- rows and labels -----------------------------------------------------------------------------


@fault(
    role="token_nll", caught_by=[f"{IGNORED}[first]", f"{IGNORED}[half]"],
    seen_in="linkedin/Liger-Kernel#968",
)  # fmt: skip
def multiplies_gradients_by_the_first_row_s(reference):
    """The whole gradient is multiplied by what comes back for row 0: nothing if it is ignored."""

    def products(slopes, hidden, weight, upstream):
        counts = slopes[0].abs().sum() > 0
        return right_products(slopes, hidden, weight, upstream * counts)

    return loss_kernel(products=products)


@fault(role="token_nll", caught_by=f"{IGNORED}[all]", seen_in="OpenRLHF/OpenRLHF PR#583")
def divides_and_multiplies_by_the_count(reference):
    """Slopes are divided by the number of targets and multiplied again: 0 / 0 without one."""

    def slopes(logits, labels):
        count = (labels != NO_TARGET).sum()
        return right_slopes(logits, labels) / count * count

    return loss_kernel(slopes=slopes)


@fault(role="token_nll", caught_by=IGNORED, seen_in="own")
def gives_ignored_rows_a_gradient(reference):
    """The loss of ignored rows is dropped, the pull of their softmax is not."""

    def slopes(logits, labels):
        chosen = F.one_hot(labels.clamp(min=0), logits.shape[1])
        return logits.softmax(-1) - chosen * (labels != NO_TARGET)[:, None]

    return loss_kernel(slopes=slopes)


@fault(role="token_nll", caught_by=[SHAPES, f"{IGNORED}[first]"], seen_in="own")
def drops_the_last_rows_of_a_chunk(reference):
    """Rows after the last whole chunk of 16 have no gradient."""

    def slopes(logits, labels):
        whole = torch.arange(len(labels), device=labels.device) < len(labels) // 16 * 16
        return right_slopes(logits, labels) * whole[:, None]

    return loss_kernel(slopes=slopes)


@fault(role="token_nll", caught_by=SHAPES, seen_in="vllm-project/speculators PR#942")
def counts_ignored_rows(reference):
    """num_tokens is the number of rows."""

    def token_nll(hidden, weight, labels):
        nll_sum, num_tokens = loss_kernel()(hidden, weight, labels)
        return nll_sum, torch.full_like(num_tokens, len(labels))

    return token_nll


@fault(role="token_nll", caught_by="m4_memory::test_layouts[token_nll]", seen_in="own")
def reads_hidden_states_as_dense(reference):
    """A slice of the hidden states, without its last token, is read without its strides."""
    return loss_kernel(logits=lambda hidden, weight: right_logits(densely(hidden), weight))
