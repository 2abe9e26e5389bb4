"""M4. The linear layer and cross-entropy in one, over as many rows as a training step has."""

from __future__ import annotations

import math

import torch

from gates import operators
from gates.operator_cases import nll_case, some_labels
from gates.operators import short
from harness import gate
from harness.compare import place, relative_error
from reference.loss import NO_TARGET

KINDS = 4096  # different hidden states


@gate(
    claim="of as many rows as a training step has (on a GPU more than 2^31 logits) the sum and "
    "all gradients are right, and those of each row and of each token are about as near as one "
    "rounding: of tokens that are labels, of frequent ones that are predicted as often as they "
    "come, and of all others",
    roles=["token_nll"],
    not_claimed="more than 16,897 rows; on a CPU 4099, and the chunks that a GPU's memory asks for",
    source="fla-org/flash-linear-attention PR#1082: a row offset in 32 bits wraps; "
    "linkedin/Liger-Kernel#512, InternLM/xtuner PR#1747: training that diverges late, with a "
    "gradient added up over chunks in 16 bits",
)
def test_rows(stack, rng, device, check):
    # 10 GB of float32 logits, which a plain formula holds three times in its backward.
    large = device.type != "cpu"
    rows, width, columns = (16_897, 896, 151_936) if large else (4099, 64, 2003)
    check("logits", rows * columns, at_least=2**31 if large else 2**22,
          because="offsets of 32 bits end at 2^31")  # fmt: skip
    case, kind_M, labels_M, frequent = rows_with_frequent_labels(rng, rows, width, columns)
    chosen, often = (torch.zeros(columns, dtype=torch.bool) for _ in range(2))
    chosen[labels_M[labels_M != NO_TARGET]], often[frequent] = True, True
    tokens = {"frequent labels": often, "other labels": chosen & ~often, "others": ~chosen}
    for dtype in operators.dtypes(stack):
        kinds_KD, weight = (x.to(device, dtype) for x in case.tensors.values())
        tensors = {"hidden": kinds_KD[kind_M.to(device)].requires_grad_(),
                   "weight": weight.requires_grad_()}  # fmt: skip
        nll_sum, _ = stack.token_nll(*tensors.values(), labels_M.to(device))
        forward = {"nll": nll_sum}
        got = operators.backward_of(forward, tensors, {"nll": torch.ones_like(nll_sum)})
        oracle = oracle_of_kinds(kinds_KD, weight, kind_M, labels_M)
        exact = oracle["nll"]
        operators.judge(check, f"{short(dtype)} nll", dtype, nll_sum, exact.float(), exact)
        check_lines(check, f"{short(dtype)} dhidden", got["dhidden"], oracle["dhidden"], worst=40.0,
                    because="slopes rounded as operands, times heights of 12")  # fmt: skip
        ignored = got["dhidden"][(labels_M == NO_TARGET).to(device)]
        check(f"{short(dtype)}: largest dhidden of a row without a target", ignored.abs().max(),
              equal=0.0, because="the sum does not depend on it")  # fmt: skip
        for name, lines in tokens.items():
            both = (x[lines.to(x.device)] for x in (got["dweight"], oracle["dweight"]))
            check_lines(check, f"{short(dtype)} dweight of {name}", *both)


def rows_with_frequent_labels(rng, rows, width, columns):
    """(case of the kinds, kind_M, labels_M, frequent tokens): hidden_m is kinds[kind_m].

    Four tokens are the label of a tenth of all rows each and as likely everywhere, and half of the
    features have a mean of 1: what softmax adds to the gradient of the four is nearly what the
    labels take away.
    """
    labels_M = some_labels(rng, rows, columns)
    frequent = torch.arange(4) * (columns // 4) + 5
    often_M = (labels_M != NO_TARGET) & (torch.rand(rows, generator=rng) < 0.4)
    labels_M[often_M] = frequent[torch.randint(4, (int(often_M.sum()),), generator=rng)]
    case = nll_case(rng, labels_M[:KINDS], width, columns)
    hidden, weight = case.tensors.values()
    hidden[:, : width // 2] += 1.0
    hidden[:, 0], weight[frequent, 0] = 1.0, math.log(columns)
    weight[frequent, 1:] *= 0.1
    p_V = (hidden[:64] @ weight.T).softmax(1).mean(0)
    rest, share = 1 - p_V[frequent].sum(), 0.1 / 0.6  # of the four, to what is left to the others
    weight[frequent, 0] += (share * rest / p_V[frequent]).log()
    return case, torch.arange(rows) % len(hidden), labels_M, frequent


def oracle_of_kinds(kinds_KD, weight_VD, kind_M, labels_M):
    """nll, dhidden [M, D] and dweight of rows hidden_m = kinds[kind_m], in float64.

    With n_k targets among the rows of a kind and p_k = softmax(kinds_k weight^T):
    dweight = sum_k n_k p_k kinds_k - sum_m 1[labels_m] hidden_m, and dhidden_m is
    p W - W[labels_m]: no more than K rows of logits.
    """
    where = place(kinds_KD)
    kinds_KD, weight_VD = (x.detach().to(where, torch.float64) for x in (kinds_KD, weight_VD))
    kind_M, labels_M = kind_M.to(where), labels_M.to(where)
    is_target = labels_M != NO_TARGET
    kinds, labels = kind_M[is_target], labels_M[is_target]
    log_p_KV = (kinds_KD @ weight_VD.T).log_softmax(1)
    nll = -log_p_KV[kinds, labels].sum()
    p_KV = log_p_KV.exp_()
    dhidden_MD = kinds_KD.new_zeros(len(labels_M), kinds_KD.shape[1])
    dhidden_MD[is_target] = (p_KV @ weight_VD)[kinds] - weight_VD[labels]
    counts_K = kinds.bincount(minlength=len(kinds_KD))
    dweight_VD = p_KV.mul_(counts_K[:, None]).T @ kinds_KD
    dweight_VD.index_add_(0, labels, kinds_KD[kinds], alpha=-1)
    return {"nll": nll, "dhidden": dhidden_MD, "dweight": dweight_VD}


def check_lines(check, name, got, oracle, worst=6.0, because="three times what is typical"):
    """Of every line the error over twice that of storing it, or a tenth of the median line.

    Twice, as everywhere: the plain formula's error, in 16 bits one rounding, and the floor. In
    float32 the plain error is that of long sums, and of p - 1 where p is nearly 1: the milestone's
    bound decides.
    """
    oracle = oracle.to(place(got))
    got = got.detach().to(oracle.device)
    check(f"{name}: relative error", relative_error(got, oracle),
          at_most=operators.ABSOLUTE[got.dtype], because="the milestone's bound")  # fmt: skip
    if got.dtype == torch.float32:
        return
    error = (got.double() - oracle).square().mean(-1).sqrt()
    floor = (oracle.to(got.dtype).double() - oracle).square().mean(-1).sqrt()
    ratio = error / (2 * floor.clamp(min=0.1 * float(floor[floor > 0].median())))
    check(f"{name}: error of a line / one rounding, typical", ratio.square().mean().sqrt(),
          at_most=2.0, because=operators.RATIO_BECAUSE)  # fmt: skip
    check(f"{name}: error of a line / one rounding, worst", ratio.max(), at_most=worst,
          because=f"{because}; a line that is lost is off by 300 roundings")  # fmt: skip
