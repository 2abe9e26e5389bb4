"""M1. The loss is a sum and a count over the targets, with logits of float32 or better."""

from __future__ import annotations

import math

import pytest
import torch

from gates import toys
from harness import gate
from harness.compare import relative_error
from reference.loss import NO_TARGET

NUM_ROWS, WIDTH, VOCABULARY = 23, 16, 131  # a prime vocabulary: no block size divides it


def random_case(stack, rng, device, mean_logit):
    """Logits of standard deviation 4 around mean_logit, and labels of which a third are none."""
    hidden_MD = torch.randn(NUM_ROWS, WIDTH, generator=rng, dtype=torch.float64)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=rng, dtype=torch.float64)
    hidden_MD[:, 0], weight_VD[:, 0] = 1.0, mean_logit
    labels_M = torch.randint(VOCABULARY, (NUM_ROWS,), generator=rng)
    labels_M[1::3] = NO_TARGET
    labels_M[0], labels_M[2] = 0, VOCABULARY - 1
    dtype = toys.working_dtype(stack)
    return hidden_MD.to(device, dtype), weight_VD.to(device, dtype), labels_M.to(device)


def formula(hidden_MD, weight_VD, labels_M):
    """The sum from probabilities, in float64 on the CPU."""
    logits_MV = hidden_MD @ weight_VD.T
    log_probability_MV = logits_MV - logits_MV.logsumexp(-1, keepdim=True)
    return -sum(log_probability_MV[m, v] for m, v in enumerate(labels_M.tolist()) if v >= 0)


@gate(
    claim="the sum over the targets of -log softmax, its gradients, and their number; never a mean",
    roles=["token_nll"],
    not_claimed="vocabularies beyond 2^31 logits",
    source="huggingface/transformers PR#34191 (sums, not means); verl-project/verl#2899 (padded "
    "columns count as exp(0))",
)
@pytest.mark.parametrize("mean_logit", [0.0, -30.0], ids=["logits-0", "logits-30-down"])
def test_values(stack, mean_logit, rng, device, check):
    hidden, weight, labels = random_case(stack, rng, device, mean_logit)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    oracle_inputs = [x.detach().cpu().double().requires_grad_() for x in inputs]
    want = formula(*oracle_inputs, labels.cpu())
    nll_sum, num_tokens = stack.token_nll(*inputs, labels)
    check("shape of the sum", list(nll_sum.shape), equal=[], because="a scalar")
    check("dtypes", [str(nll_sum.dtype), str(num_tokens.dtype)],
          equal=[str(hidden.dtype), "torch.int64"], because="promote(dtype, float32)")  # fmt: skip
    check("targets", num_tokens, equal=int((labels >= 0).sum()), because="labels that are not -100")
    bound = toys.rounding(nll_sum.dtype)
    because = "another order of the same sums"
    check("relative error", abs(nll_sum.item() / want.item() - 1), at_most=bound, because=because)
    upstream = 0.37  # as dividing by the targets of the window does
    gradients = torch.autograd.grad(nll_sum * upstream, inputs)
    oracle_gradients = torch.autograd.grad(want * upstream, oracle_inputs)
    names = ("dhidden", "dweight")
    for name, gradient, oracle in zip(names, gradients, oracle_gradients, strict=True):
        check(f"relative error of {name}", relative_error(gradient, oracle), at_most=bound,
              because=because)  # fmt: skip


@gate(
    claim="without a target the sum is 0, the count is 0, and every gradient is a finite zero",
    roles=["token_nll"],
    not_claimed="what an update makes of it (m2_windows)",
    source="pytorch/pytorch#70348; a masked mean of nothing is 0 / 0",
)
@pytest.mark.parametrize("num_rows", [NUM_ROWS, 0], ids=["ignored", "empty"])
def test_no_target(stack, num_rows, rng, device, check):
    hidden, weight, labels = random_case(stack, rng, device, 0.0)
    inputs = [hidden[:num_rows].clone().requires_grad_(), weight.requires_grad_()]
    nll_sum, num_tokens = stack.token_nll(*inputs, torch.full_like(labels[:num_rows], NO_TARGET))
    check("sum", nll_sum, equal=0.0, because="a sum of nothing")
    check("count", num_tokens, equal=0, because="a count of nothing")
    gradients = torch.autograd.grad(nll_sum, inputs, materialize_grads=True)
    for name, gradient in zip(("hidden", "weight"), gradients, strict=True):
        check(f"gradient of {name}", gradient.abs().sum(), equal=0.0,
              because="NaN here poisons every rank that shares the sum")  # fmt: skip


@gate(
    claim="with 16-bit inputs the log-softmax and the sum are in float32: the loss of a token is "
    "off by less than the rounding of its logits",
    roles=["token_nll"],
    not_claimed="that logits are kept in float32; rounding them to bfloat16 once is accepted",
    source="google-deepmind/optax#1020: 9.8648 became 9.875",
)
def test_bfloat16(stack, rng, device, check):
    num_rows, width, vocabulary_size = 64, 32, 3001
    dtype = toys.half_dtype(stack)
    eps = torch.finfo(dtype).eps
    hidden = torch.randn(num_rows, width, generator=rng).to(device, dtype)
    weight = (0.1 * torch.randn(vocabulary_size, width, generator=rng)).to(device, dtype)
    labels = torch.randint(vocabulary_size, (num_rows,), generator=rng).to(device)
    logits = hidden.cpu().double() @ weight.cpu().double().T
    want = torch.nn.functional.cross_entropy(logits, labels.cpu(), reduction="none")
    got, dtypes = [], set()
    for m in range(num_rows):
        nll_sum, _ = stack.token_nll(hidden[m : m + 1], weight, labels[m : m + 1])
        got.append(float(nll_sum))
        dtypes.add(str(nll_sum.dtype))
    check("dtype of the sum", sorted(dtypes), equal=["torch.float32"], because="never 16 bits")
    error = torch.tensor(got, dtype=torch.float64) - want
    check("largest error of a token", error.abs().max() / logits.abs().max(), at_most=eps / 2,
          because="a logit rounded to 16 bits is off by eps / 4 of itself; a loss of ln V = 8 "
          "rounded so by eps / 4 of 8")  # fmt: skip
    nll_sum, _ = stack.token_nll(hidden, weight, labels)
    error_of_sum = abs(float(nll_sum) / float(want.sum()) - 1)
    check("relative error of the sum", error_of_sum, at_most=eps / 40,
          because="errors of logits average out: 2e-4 in bfloat16; a sum in it is off by "
          "2e-3")  # fmt: skip


@gate(
    claim="a label that is no token and not -100 is refused",
    roles=["token_nll"],
    not_claimed="which labels are right (m1_labels)",
    source="mlfoundations/open_lm PR#77: a modulo hid the wrong tokenizer",
)
@pytest.mark.parametrize("label", [VOCABULARY, -1, -101, 2**20])
def test_foreign_label(stack, label, rng, device, check):
    hidden, weight, labels = random_case(stack, rng, device, 0.0)
    labels[5] = label
    outcome = math.nan
    try:
        outcome = float(stack.token_nll(hidden, weight, labels)[0])
    except ValueError:
        outcome = "refused"
    check("outcome", outcome, equal="refused", because="it comes from another vocabulary")
