"""How far two outcomes of one model and batch are apart, and how far they may be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gates.outcomes import Outcome
from harness.compare import error_ratio, max_abs_error, relative_error, rounding_floor

TOP = 10  # the most likely tokens whose sets are compared


def settled(outcome: Outcome, oracle: Outcome) -> Outcome:
    """The outcome with the relative errors of its gradients in their place."""
    return replace(outcome, gradients={}, errors=gradient_errors(outcome, oracle))


def gradient_errors(outcome: Outcome, oracle: Outcome) -> dict[str, float]:
    """||got - want|| / ||want|| in the 2-norm of every gradient; NaN where the oracle has none."""
    want = oracle.gradients
    return outcome.errors or {
        name: relative_error(gradient, want[name]) if name in want else math.nan
        for name, gradient in outcome.gradients.items()
    }


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
    got, want = (x.topk(TOP).indices for x in (logits_MV, want_MV))
    return float((got[:, :, None] == want[:, None, :]).sum() / want.numel())


def check_close(
    check: Any,
    got: Outcome,
    want: Outcome,
    *,
    at_most: float,
    because: str,
    worst_at_most: float | None = None,
) -> None:
    """Every part of `got` within `at_most`, relatively, of `want`.

    worst_at_most: of the hidden state of a single token, where that is less exact than all tokens
    together (RMS), which are held to `at_most` in any case.
    """
    worst = at_most if worst_at_most is None else worst_at_most
    states = [("after a layer", *pair) for pair in zip(got.layers, want.layers, strict=True)]
    for where, state, want_state in [*states, ("after the final norm", got.hidden, want.hidden)]:
        by_token = relative_by_token(state, want_state)
        check(f"hidden state {where}, RMS of tokens", float(by_token.square().mean().sqrt()),
              at_most=at_most, because=f"relative to the token's 2-norm; {because}")  # fmt: skip
        check(f"hidden state {where}, worst token", float(by_token.max()), at_most=worst,
              because=f"relative to the token's 2-norm; {because}")  # fmt: skip
    check("logits, worst token", worst_token(got.logits, want.logits), at_most=at_most,
          because=f"relative to the 2-norm of the token's logits; {because}")  # fmt: skip
    check("KL of a token, worst", divergence(got.logits, want.logits).max(), at_most=1e-8,
          because="half the variance of errors of 1e-4 in the logits", unit="nats")  # fmt: skip
    check(f"top {TOP} of a token in common", shared_top(got.logits, want.logits), at_least=0.998,
          because="only logits closer than their errors can change places")  # fmt: skip
    check("loss", abs(got.loss / want.loss - 1), at_most=at_most, because=f"relative; {because}")
    check("loss of a token, worst", max_abs_error(got.nll, want.nll) / want.loss,
          at_most=30 * at_most, because="of up to 16, relative to the mean; torch's "
          "log-softmax in float32 is 2e-5 nats a token off for 49152 logits")  # fmt: skip
    check_loss(check, got)
    if want.gradients:
        check_gradients(check, got, want, at_most=at_most, because=because)


def check_loss(check: Any, got: Outcome) -> None:
    """The loss of tokens is that of their own hidden states; rounded logits are let pass."""
    error = float((got.nll.double() - got.nll_of_hidden.double()).square().mean().sqrt())
    half_a_unit = torch.finfo(got.hidden.dtype).eps / 2
    logits = float(got.logits.double().square().mean().sqrt())
    check("loss of a token from its hidden state, error over rounded logits'", error
          / (half_a_unit * logits + 4e-5) / got.group, at_most=1.0, because="RMS; a log-softmax in "
          "float32 adds 2e-5 nats for 49152 logits, one in bfloat16 has steps of 1/32")  # fmt: skip


def check_gradients(
    check: Any, got: Outcome, want: Outcome, *, at_most: float, because: str
) -> None:
    """The gradient of every parameter, each relative to its own 2-norm."""
    check_names(check, got, want)
    for error in gradient_errors(got, want).values():
        check("gradient of a parameter, worst", error, at_most=at_most,
              because=f"relative to the gradient's 2-norm; {because}")  # fmt: skip


def check_names(check: Any, got: Outcome, want: Outcome) -> None:
    """The parameters that have a gradient."""
    names = sorted(got.errors or got.gradients)
    check("parameters with a gradient", names, equal=sorted(want.gradients), because="a tied table "
          "is one parameter; the names are those of checkpoints")  # fmt: skip


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
    check_names(check, got, oracle)
    mine, theirs = gradient_errors(got, oracle), gradient_errors(plain, oracle)
    of_vectors = []
    for name, want in oracle.gradients.items():
        if want.dim() > 1:
            check("error ratio of the gradient of a matrix, worst", mine[name] / theirs[name],
                  at_most=k, because=f"k times the error of {whose}")  # fmt: skip
        else:  # the ratio of errors of a few elements scatters widely: they are taken together
            of_vectors.append([mine[name], theirs[name]])
    errors = torch.tensor(of_vectors, dtype=torch.float64).norm(dim=0)
    check("error ratio of the gradients of all vectors", errors[0] / errors[1], at_most=k,
          because=f"relative errors together; k times those of {whose}")  # fmt: skip


def largest_ratio(got: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """max|got - oracle| over max|plain - oracle| + the largest rounding of the oracle."""
    accepted = max_abs_error(plain, oracle) + rounding_floor(oracle, got.dtype)
    return max_abs_error(got, oracle) / accepted


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
