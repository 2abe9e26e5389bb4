"""What two implementations of one model make of one batch, and how far that is apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gates import twins
from harness.compare import error_ratio, max_abs_error, relative_error, rounding_floor
from reference.ops import arithmetic_dtype

TOP = 10  # the most likely tokens whose sets are compared


@dataclass(frozen=True)
class Outcome:
    """Of one forward and backward pass, on the CPU, at tokens that are no padding.

    layers: the output [M, D] of each layer; hidden [M, D]: after the final norm; logits [M, V];
    nll: of each `group` of targets, in nats; nll_of_hidden: the same from `hidden` by the formula,
    in float32 or better; loss: the sum over the number of targets; gradients: of the loss, by the
    decoder's parameter names (empty if none were asked for).
    """

    layers: list[Tensor]
    hidden: Tensor
    logits: Tensor
    nll: Tensor
    nll_of_hidden: Tensor
    loss: float
    group: int
    gradients: dict[str, Tensor] = field(default_factory=dict)


def of_stack(
    stack: Any, model: nn.Module, batch: twins.Batch, *, gradients: bool, group: int = 1
) -> Outcome:
    """The model on trial: its hidden states, and the loss by `stack.token_nll`.

    The loss of each group of `group` targets is taken by itself as well, since an error of one
    token disappears in a mean.
    """
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda layer, args, output: outputs.append(output.detach()))
        for layer in model.layers
    ]
    data = batch.microbatch
    with torch.set_grad_enabled(gradients):
        hidden_BTD = model(data.input_ids, data.positions, data.documents)
        head_VD = model.lm_head.weight
        nll_sum, num_targets = stack.token_nll(
            hidden_BTD.flatten(0, 1), head_VD, data.labels.flatten()
        )
    for handle in handles:
        handle.remove()
    real, targets = batch.real_BT, batch.is_target_BT
    with torch.no_grad():
        head = head_VD.to(hidden_BTD.dtype)
        logits_MV = stack.linear(hidden_BTD[real], head, None)
        parts = hidden_BTD[targets].split(group), data.labels[targets].split(group)
        pieces = [(hidden, head, labels) for hidden, labels in zip(*parts, strict=True)]
        nll = [stack.token_nll(*piece)[0] for piece in pieces]
        formula = [token_nll(*piece) for piece in pieces]
    found = {}
    if gradients:
        model.zero_grad(set_to_none=True)
        (nll_sum / num_targets).backward()
        found = taken(model.named_parameters())
    return Outcome(
        layers=[output[real].cpu() for output in outputs],
        hidden=hidden_BTD.detach()[real].cpu(),
        logits=logits_MV.cpu(),
        nll=torch.stack(nll).cpu(),
        nll_of_hidden=torch.stack(formula).cpu(),
        loss=float(nll_sum.detach() / num_targets),
        group=group,
        gradients=found,
    )


def of_twin(twin: nn.Module, batch: twins.Batch, *, gradients: bool, group: int = 1) -> Outcome:
    """transformers' model: logits are cast to float32 before the loss, as its own loss does."""
    with torch.set_grad_enabled(gradients):
        layers, hidden_BTD, logits_BTV = twins.forward(twin, batch)
        targets, real = batch.is_target_BT, batch.real_BT
        wide = logits_BTV[targets].to(arithmetic_dtype(logits_BTV.dtype))
        nll = F.cross_entropy(wide, batch.microbatch.labels[targets], reduction="none")
    found = {}
    if gradients:
        twin.zero_grad(set_to_none=True)
        nll.mean().backward()
        found = taken((n.removeprefix("model."), p) for n, p in twin.named_parameters())
    nll = nll.detach()
    by_group = torch.stack([piece.sum() for piece in nll.split(group)]).cpu()
    return Outcome(
        layers=[layer.detach()[real].cpu() for layer in layers],
        hidden=hidden_BTD.detach()[real].cpu(),
        logits=logits_BTV.detach()[real].cpu(),
        nll=by_group,
        nll_of_hidden=by_group,
        loss=float(nll.mean()),
        group=group,
        gradients=found,
    )


def token_nll(hidden_MD: Tensor, head_VD: Tensor, labels_M: Tensor) -> Tensor:
    """-log softmax(hidden head^T) of the labels, summed, in float32 or better."""
    dtype = arithmetic_dtype(hidden_MD.dtype)
    logits_MV = hidden_MD.to(dtype) @ head_VD.to(dtype).T
    return F.cross_entropy(logits_MV, labels_M, reduction="sum")


def taken(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The gradients, on the CPU, and no longer the parameters'; zeros where there is none."""
    found = {}
    for name, parameter in parameters:
        gradient = parameter.grad
        parameter.grad = None
        found[name] = torch.zeros(parameter.shape) if gradient is None else gradient.cpu()
    return found


def worst_token(got_MX: Tensor, want_MX: Tensor) -> float:
    """max over m of ||got_m - want_m|| / ||want_m|| in the 2-norm of one token; NaN if any is."""
    return float(relative_by_token(got_MX, want_MX).max())


def relative_by_token(got_MX: Tensor, want_MX: Tensor) -> Tensor:
    """||got_m - want_m|| / ||want_m|| in the 2-norm of each token, float64 [M]."""
    want_MX = want_MX.double()
    return (got_MX.double() - want_MX).norm(dim=-1) / want_MX.norm(dim=-1)


def divergence(logits_MV: Tensor, want_MV: Tensor) -> Tensor:
    """KL(softmax(want) || softmax(logits)) of every token, in nats, float64 [M]."""
    found = []
    for pieces in zip(want_MV.split(64), logits_MV.split(64), strict=True):
        log_p, log_q = (x.double().log_softmax(-1) for x in pieces)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(found)


def shared_top(logits_MV: Tensor, want_MV: Tensor) -> float:
    """The share of the `TOP` most likely tokens that are the same, over all tokens."""
    sets = [torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.topk(TOP).indices, True)
            for x in (logits_MV, want_MV)]  # fmt: skip
    return float((sets[0] & sets[1]).sum() / sets[1].sum())


def check_close(check: Any, got: Outcome, want: Outcome, *, at_most: float, because: str) -> None:
    """Every part of `got` within `at_most`, relatively, of `want`."""
    for layer, want_layer in zip(got.layers, want.layers, strict=True):
        check("hidden state after a layer, worst token", worst_token(layer, want_layer),
              at_most=at_most, because=f"relative to the token's 2-norm; {because}")  # fmt: skip
    check("final hidden state, worst token", worst_token(got.hidden, want.hidden), at_most=at_most,
          because=f"relative to the token's 2-norm; {because}")  # fmt: skip
    check("logits, worst token", worst_token(got.logits, want.logits), at_most=at_most,
          because=f"relative to the 2-norm of the token's logits; {because}")  # fmt: skip
    check("KL of a token, worst", divergence(got.logits, want.logits).max(), at_most=1e-8,
          because="half the variance of errors of 1e-4 in the logits", unit="nats")  # fmt: skip
    check(f"top {TOP} of a token in common", shared_top(got.logits, want.logits), at_least=0.998,
          because="only logits closer than their errors can change places")  # fmt: skip
    check("loss", abs(got.loss / want.loss - 1), at_most=at_most, because=f"relative; {because}")
    check("loss of a token, worst", max_abs_error(got.nll, want.nll) / want.loss,
          at_most=10 * at_most, because="relative to the mean; no mean hides it")  # fmt: skip
    check_loss(check, got)
    if want.gradients:
        check_gradients(check, got.gradients, want.gradients, at_most=at_most, because=because)


def check_loss(check: Any, got: Outcome) -> None:
    """The loss of tokens is that of their own hidden states; rounded logits are let pass."""
    error = float((got.nll.double() - got.nll_of_hidden.double()).square().mean().sqrt())
    half_a_unit = torch.finfo(got.hidden.dtype).eps / 2
    logits = float(got.logits.double().square().mean().sqrt())
    check("loss of a token from its hidden state, error over rounded logits'", error
          / (half_a_unit * logits + 1e-5) / got.group, at_most=1.0, because="RMS; float32 adds "
          "nothing; a log-softmax in bfloat16 has steps of 1/32")  # fmt: skip


def check_gradients(
    check: Any,
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    *,
    at_most: float,
    because: str,
) -> None:
    """The gradient of every parameter, each relative to its own 2-norm."""
    check("parameters with a gradient", sorted(got), equal=sorted(want), because="a tied table is "
          "one parameter; the names are those of checkpoints")  # fmt: skip
    for name, gradient in want.items():
        check("gradient of a parameter, worst", relative_error(got[name], gradient),
              at_most=at_most, because=f"relative to the gradient's 2-norm; {because}")  # fmt: skip


def check_ratios(
    check: Any, got: Outcome, plain: Outcome, oracle: Outcome, *, k: float, whose: str
) -> None:
    """Errors of `got` over those of `plain`, both against the oracle, at most `k` (RMS)."""
    because = f"k times the error of {whose} in the same dtype, and of one rounding"
    for layers in zip(got.layers, plain.layers, oracle.layers, strict=True):
        errors = [relative_by_token(layer, layers[-1]) for layer in layers[:-1]]
        typical = [float(error.median()) for error in errors]
        together = [float(error.square().mean().sqrt()) for error in errors]
        check("error ratio of the hidden state after a layer, median token", typical[0]
              / typical[1], at_most=k, because=because)  # fmt: skip
        check("error ratio of the hidden state after a layer, all tokens", together[0]
              / together[1], at_most=2 * k, because="a single token, whose parts are 100 times "
              f"larger than their sum, may outweigh the others; {because}")  # fmt: skip
    for name in ("hidden", "logits", "nll"):
        parts = [getattr(outcome, name) for outcome in (got, plain, oracle)]
        title = {"hidden": "final hidden state", "logits": "logits", "nll": "loss of a token"}[name]
        check(f"error ratio of the {title}", error_ratio(*parts), at_most=k, because=because)
        check(f"ratio of the largest errors of the {title}", largest_ratio(*parts), at_most=2 * k,
              because=f"{because}; single elements scatter more")  # fmt: skip
    kl = [float(divergence(x.logits, oracle.logits).mean()) for x in (got, plain)]
    floor = torch.finfo(got.logits.dtype).eps ** 2
    check("ratio of the mean KL of a token", kl[0] / (kl[1] + floor), at_most=k**2,
          because=f"second order: k^2 times that of {whose}")  # fmt: skip
    shares = [shared_top(x.logits, oracle.logits) for x in (got, plain)]
    check(f"top {TOP} of a token kept, less the share of {whose}", shares[0] - shares[1],
          at_least=-0.02, because="near ties change places on both sides")  # fmt: skip
    errors = plain.nll.double() - oracle.nll.double()
    standard_error = float(errors.norm() / oracle.nll.double().sum())
    check("loss", abs(got.loss / oracle.loss - 1), at_most=1e-3 + 3 * standard_error,
          because="relative to the oracle's: the end-to-end bound, and 3 standard errors of a mean "
          f"over these few tokens with the errors of {whose}")  # fmt: skip
    check_loss(check, got)
    if oracle.gradients:
        check_gradient_ratios(check, got, plain, oracle, k=k, whose=whose)


def check_gradient_ratios(
    check: Any, got: Outcome, plain: Outcome, oracle: Outcome, *, k: float, whose: str
) -> None:
    """The gradient of every matrix by error ratio, and those of all vectors together."""
    k *= 4 / 3  # with fewer terms in a sum errors scatter more: 0.6 to 1.35 for the reference
    names = [sorted(outcome.gradients) for outcome in (got, oracle)]
    check("parameters with a gradient", names[0], equal=names[1], because="a tied table is one "
          "parameter; the names are those of checkpoints")  # fmt: skip
    of_vectors = []
    for name, want in oracle.gradients.items():
        parts = got.gradients[name], plain.gradients[name], want
        if want.dim() > 1:
            check("error ratio of the gradient of a matrix, worst", ratio_by_pieces(*parts),
                  at_most=k, because=f"k times the error of {whose}")  # fmt: skip
        else:  # the ratio of errors of a few elements scatters widely: they are taken together
            of_vectors.append([relative_error(part, want) for part in parts[:2]])
    errors = torch.tensor(of_vectors, dtype=torch.float64).norm(dim=0)
    check("error ratio of the gradients of all vectors", errors[0] / errors[1], at_most=k,
          because=f"relative errors together; k times those of {whose}")  # fmt: skip


def ratio_by_pieces(got: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """`error_ratio`, in memory that does not grow with the size of the tensors."""
    squares = torch.zeros(3, dtype=torch.float64)
    pieces = (x.flatten().split(2**22) for x in (got, plain, oracle))
    for mine, theirs, exact in zip(*pieces, strict=True):
        wide = exact.double()
        rounding = wide.to(got.dtype).double() - wide
        errors = (mine.double() - wide, theirs.double() - wide, rounding)
        squares += torch.stack([error.square().sum() for error in errors])
    error, accepted, floor = squares.sqrt()
    return 0.0 if error == 0 else float(error / (accepted + floor))


def largest_ratio(got: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """max|got - oracle| over max|plain - oracle| + the largest rounding of the oracle."""
    accepted = max_abs_error(plain, oracle) + rounding_floor(oracle, got.dtype)
    return max_abs_error(got, oracle) / accepted


def recording(stack: Any, role: str, calls: list[tuple[Any, ...]]) -> Any:
    """The stack, in which every call of `role` leaves its arguments and its result in `calls`."""

    def noting(*arguments: Any) -> Any:
        result = getattr(stack, role)(*arguments)
        kept = (x.detach().cpu() if isinstance(x, Tensor) else x for x in (*arguments, result))
        calls.append(tuple(kept))
        return result

    return stack.replace({role: noting})


def check_norms(check: Any, calls: list[tuple[Any, ...]], *, num_norms: int) -> None:
    """Each recorded norm is x / rms(x) * gain in float64, rounded once to the dtype of x."""
    check("norms that were recorded", len(calls), equal=num_norms, because="two a layer and one")
    for x, gain, epsilon, y in calls:
        wide = x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain.double()
        moved = (y != exact.to(y.dtype)).double().mean()
        check("share of a norm's outputs that are not the nearest, worst", moved, at_most=0.01,
              because="float32 crosses a tie in 1 of 1000; a cast before the gain moves "
              "24 %")  # fmt: skip
