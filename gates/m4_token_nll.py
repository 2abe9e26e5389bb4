"""M4. The linear layer and cross-entropy in one, in every dtype: sums, gradients, large logits."""

from __future__ import annotations

import pytest
import torch

from gates import ladder, operators, recorded
from gates.operator_cases import nll_case, some_labels
from gates.operators import short
from harness import gate
from reference.loss import NO_TARGET

ROWS = (1, 2, 15, 16, 17, 63, 65, 129)
# No tile divides a prime, 50257 or 129920; a CPU compiles each width and vocabulary once.
VOCABULARIES = {"cpu": (131,), "cuda": (127, 128, 131, 1009, 50_257, 129_920)}


def vocabularies(device):
    """The sizes for this kind of device; the last has many tiles, of the largest size."""
    return VOCABULARIES.get(device.type, VOCABULARIES["cuda"])


@gate(
    claim="the sum and its gradients are as near to the oracle as the plain formula, for numbers "
    "of rows around every tile edge and vocabularies that no tile divides; the count is int64",
    roles=["token_nll"],
    not_claimed="foreign labels (m1_loss), memory layouts (m4_memory), speed",
    source="verl-project/verl#2899 (129920 columns), vllm-project/speculators PR#993 (columns "
    "beyond the largest block dropped)",
)
def test_shapes(stack, rng, device, check):
    for dtype in operators.dtypes(stack):
        for vocabulary_size in vocabularies(device):
            for rows in ROWS if vocabulary_size <= 131 else (17, 129):
                labels_M = some_labels(rng, rows, vocabulary_size)
                if rows == 1:
                    labels_M[:] = vocabulary_size - 1
                case = nll_case(rng, labels_M, 64, vocabulary_size)
                at = f"[{rows}, 64] over {vocabulary_size}"
                operators.trial(stack, case, dtype, device, rng, check, at=at)
                tensors = [x.to(device, dtype) for x in case.tensors.values()]
                nll_sum, num_tokens = stack.token_nll(*tensors, labels_M.to(device))
                check("dtypes of sum and count", [str(nll_sum.dtype), str(num_tokens.dtype)],
                      equal=["torch.float32", "torch.int64"], because="a contract")  # fmt: skip
                check("tokens too many", int(num_tokens) - int((labels_M >= 0).sum()), equal=0,
                      because="labels that are not -100")  # fmt: skip


@gate(
    claim="logits far from zero: with a mean of -8 or -20, and up to 600 in size, the sum and its "
    "gradients are as near to the oracle as the plain formula",
    roles=["token_nll"],
    not_claimed="logits that overflow float32",
    source="verl-project/verl#2899 (a padded column counts exp(0): 1.02 at a mean of -8), "
    "marin-community/marin PR#8217 (a softmax of two precisions: 86 % off at 640)",
)
@pytest.mark.parametrize(
    ("spread", "mean"), [(1.0, -8.0), (2.0, -20.0), (30.0, 0.0), (200.0, 0.0)],
    ids=["mean-8-down", "mean-20-down", "up-to-100", "up-to-600"],
)  # fmt: skip
def test_logits(stack, spread, mean, rng, device, check):
    for dtype in operators.dtypes(stack):
        labels_M = some_labels(rng, 65, 131)
        case = nll_case(rng, labels_M, 64, 131, spread, mean)
        # A logit z in float32 is off by z units, and its probability by as much of itself.
        loose = 1 + spread + abs(mean)
        # Slopes rounded once, as operands of a product, sum to zero but for their roundings, which
        # the mean multiplies; the plain formula does not round them.
        ratio = 1 + abs(mean) / 2
        operators.trial(stack, case, dtype, device, rng, check, loose=loose, ratio=ratio)


@gate(
    claim="one or two columns far above all others, in the first, a middle and the last tile: the "
    "sum and its gradients are as near to the oracle as the plain formula, in the rows that have "
    "them and in those beside them",
    roles=["token_nll"],
    not_claimed="logits beyond 1e7, which float32 knows to 1 or worse",
    source="own: whatever takes its exponentials relative to an estimate of the largest logit must "
    "notice where the estimate is too low",
)
@pytest.mark.parametrize("height", [20.0, 60.0, 300.0])
def test_peaks(stack, height, rng, device, check):
    columns = vocabularies(device)[-1]
    first, middle, last = 3, columns // 2, columns - 1
    labels_M = some_labels(rng, 65, columns)
    for dtype in operators.dtypes(stack):
        for heights in (
            {first: height}, {middle: height}, {last: height}, {last: height, middle: 0.6 * height},
        ):  # fmt: skip
            labels_M[20:30] = max(heights, key=heights.get)
            case = peak_case(rng, labels_M, columns, heights)
            at = f"{heights} of {columns}"
            operators.trial(stack, case, dtype, device, rng, check, at=at, loose=1 + height)


def peak_case(rng, labels_M, columns, heights):
    """Every other row's logits of some columns are as high as said, along a direction of its own.

    All hidden states and weights are at right angles to it but those, so that no element of a
    gradient stands for all peaks: its one rounding would be the whole error.
    """
    case = nll_case(rng, labels_M, 64, columns)
    direction = torch.nn.functional.normalize(operators.normal(rng, 64), dim=0)
    for x in case.tensors.values():
        x -= (x @ direction)[:, None] * direction
    case.tensors["hidden"][::2] += 8 * direction
    for column, height in heights.items():
        case.tensors["weight"][column] += height / 8 * direction
    return case


@gate(
    claim="rows without a target add nothing to the sum, the count and the gradients, wherever "
    "they stand; without any target all are zero and finite",
    roles=["token_nll"],
    not_claimed="what an update makes of it (m2_windows)",
    source="linkedin/Liger-Kernel#968 (no gradient at all if the first label is ignored), "
    "pytorch/pytorch#70348 (0 / 0)",
)
@pytest.mark.parametrize("ignored", ["all", "first", "last", "half", "all-but-one"])
def test_ignored(stack, ignored, rng, device, check):
    labels_M = torch.randint(131, (65,), generator=rng)
    where = {"all": slice(None), "first": slice(0, 1), "last": slice(64, 65),
             "half": slice(0, 65, 2), "all-but-one": slice(0, 64)}[ignored]  # fmt: skip
    labels_M[where] = NO_TARGET
    for dtype in operators.dtypes(stack):
        case = nll_case(rng, labels_M, 64, 131)
        if ignored != "all":
            operators.trial(stack, case, dtype, device, rng, check)
        tensors = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
        nll_sum, num_tokens = stack.token_nll(*tensors.values(), labels_M.to(device))
        dhidden, dweight = torch.autograd.grad(nll_sum * 0.37, list(tensors.values()))
        name = short(dtype)
        check(f"{name}: tokens too many", int(num_tokens) - int((labels_M >= 0).sum()), equal=0,
              because="labels that are not -100")  # fmt: skip
        check(f"{name}: largest dhidden of a row without a target", dhidden[where].abs().max(),
              equal=0.0, because="the sum does not depend on it")  # fmt: skip
        if ignored == "all":
            check(f"{name}: sum", nll_sum.detach(), equal=0.0, because="a sum of nothing")
            check(f"{name}: largest dweight", dweight.abs().max(), equal=0.0,
                  because="NaN here poisons every rank that shares the sum")  # fmt: skip


@gate(
    claim="the probabilities of the backward are those of the forward: the gradients of a row's "
    "logits sum to zero, so those of the weight do over the vocabulary",
    roles=["token_nll"],
    not_claimed="logits kept in 32 bits between the two",
    source="marin-community/marin PR#8217: the log-sum-exp of 16-bit logits under the exponentials "
    "of 32-bit ones",
)
@pytest.mark.parametrize("spread", [4.0, 60.0], ids=["logits-10", "logits-200"])
def test_gradients_sum_to_zero(stack, spread, rng, device, check):
    for dtype in operators.dtypes(stack):
        labels_M = some_labels(rng, 65, 131, ignored=0.0)
        case = nll_case(rng, labels_M, 64, 131, spread)
        tensors = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
        nll_sum, _ = stack.token_nll(*tensors.values(), labels_M.to(device))
        (dweight,) = torch.autograd.grad(nll_sum, tensors["weight"])
        dweight_VD = dweight.double()
        imbalance = dweight_VD.sum(0).norm() / dweight_VD.norm()
        check(f"{short(dtype)}: sum of dweight over the vocabulary / dweight", imbalance,
              at_most=max(2e-5, torch.finfo(dtype).eps) * (1 + spread / 60),
              because="elements are rounded once, either way, and logits of 32 bits by as many "
              "units as they are large; two precisions are off by eps times the logits",
              )  # fmt: skip


@gate(
    claim="the same at the width and vocabulary of the rung's model, and for real hidden states",
    roles=["token_nll"],
    not_claimed="on a CPU: more than 4096 columns; the rung's number of tokens",
    source="the presets of reference.config",
)
@pytest.mark.parametrize("inputs", ["rung", "recorded"])
def test_models(stack, inputs, rung, rng, device, check):
    def rung_cases():
        return [rung_case(rng, config, device) for config in ladder.operator_configs(rung)]

    recorded.trials("token_nll", inputs, rung_cases, stack, rng, device, check)


def rung_case(rng, config, device):
    """33 rows of the model's width, over its vocabulary."""
    columns = config.vocabulary_size
    columns = min(columns, 4096) if device.type == "cpu" else columns
    return nll_case(rng, some_labels(rng, 33, columns), config.model_width, columns)
