"""The trial of one operator: forward and backward, against the oracle and the plain formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gates.memory import framed
from harness import not_run
from harness.compare import error_ratio, max_error_ratio, place, relative_error, sign_bias
from reference.stack import ROLES

# The milestone's bounds on ||error|| / ||value||. float16 keeps 3 bits more than bfloat16, so its
# bound is 2e-2 / 8, rounded down.
ABSOLUTE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# How often the plain error is accepted, by root mean square and by maximum. The rounding of the
# result decides in 16 bits. In float32 the order of the sums does: one serial sum of n terms is
# about sqrt(n) / 4 further off than torch's blocked ones, 6 for 500 terms.
RATIOS = {torch.float32: (8.0, 12.0), torch.bfloat16: (2.0, 3.0), torch.float16: (2.0, 3.0)}
RATIO_BECAUSE = "the plain formula in this dtype, with another order of sums and one cast more"
ROW_EXPONENTS = {torch.float16: 6}  # float16 ends at 65504


@dataclass(frozen=True)
class Case:
    """Inputs of a role; `arguments(tensors)` puts them and the constants in their places.

    The tensors, in the order of the arguments, are float64 on the CPU; `dtypes` are of those that
    have a dtype of their own. The oracle is the reference's role, or what `oracle(dtype)` makes.
    """

    role: str
    tensors: dict[str, Tensor]
    arguments: Callable[[dict[str, Tensor]], tuple[Any, ...]]
    outputs: tuple[str, ...] = ("y",)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    oracle: Callable[[torch.dtype], Callable[..., Any]] | None = None
    row_exponent: int = 10  # cotangents of rows differ in scale by 2^±this
    by_row: dict[str, str] = field(default_factory=dict)  # dx: the output whose rows it follows
    shared: int = 1  # elements of a gradient that share the rounding of an operand


@dataclass
class Outcome:
    """Outputs and gradients by name."""

    forward: dict[str, Tensor]
    backward: dict[str, Tensor]


def dtypes(stack: Any) -> list[torch.dtype]:
    """float32 and the 16-bit formats that are declared. M1 is about float64."""
    taken = [dtype for dtype in stack.dtypes if dtype in ABSOLUTE]
    if not taken:
        not_run("What is on trial declares none of float32, bfloat16 and float16 (DTYPES).")
    return taken


def short(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def normal(rng: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Standard normal values times `scale`, float64 on the CPU."""
    return scale * torch.randn(shape, generator=rng, dtype=torch.float64)


def plain_layout(name: str, x: Tensor) -> Tensor:
    """Contiguous, between NaN: what is read outside of it is seen."""
    return framed(x)


def cotangents_of(
    case: Case, forward: dict[str, Tensor], rng: torch.Generator, scale: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random cotangents whose rows differ in scale, as those of tokens do, and the scales.

    A scale is a power of two, [..., 1]. Outputs with the same rows share it.
    """
    cotangents, scales = {}, {}
    drawn: dict[torch.Size, Tensor] = {}
    for name, y in forward.items():
        most = min(case.row_exponent, ROW_EXPONENTS.get(y.dtype, case.row_exponent))
        rows = y.shape[:-1]
        if rows not in drawn:
            drawn[rows] = 2.0 ** torch.randint(-most, most + 1, (*rows, 1), generator=rng).double()
        scales[name] = drawn[rows].to(y)
        cotangents[name] = normal(rng, *y.shape, scale=scale).to(y) * scales[name].view(
            scales[name].shape if y.ndim else ()
        )
    return cotangents, scales


def forward_of(
    case: Case, role: Callable[..., Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The float outputs by name."""
    outputs = role(*case.arguments(tensors))
    named = zip(case.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
    return {name: output for name, output in named if output.is_floating_point()}


def backward_of(
    forward: dict[str, Tensor],
    tensors: dict[str, Tensor],
    cotangents: dict[str, Tensor],
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """The gradient of every tensor."""
    outputs = [forward[name] for name in cotangents]
    gradients = torch.autograd.grad(
        outputs, list(tensors.values()), list(cotangents.values()), retain_graph,
        materialize_grads=True,
    )  # fmt: skip
    return {f"d{name}": gradient for name, gradient in zip(tensors, gradients, strict=True)}


def references(
    case: Case, dtype: torch.dtype, tensors: dict[str, Tensor], cotangents: dict[str, Tensor]
) -> tuple[Outcome, Outcome]:
    """The plain formula on the same tensors, and the oracle in float64 on the CPU."""

    def outcome(role: Callable[..., Any], moved: Callable[[Tensor], Tensor]) -> Outcome:
        twins = {name: moved(x.detach()).requires_grad_() for name, x in tensors.items()}
        forward = forward_of(case, role, twins)
        given = {name: moved(dy) for name, dy in cotangents.items()}
        return Outcome(forward, backward_of(forward, twins, given))

    plain = ROLES[case.role]
    oracle = case.oracle(dtype) if case.oracle else plain
    return outcome(plain, torch.clone), outcome(oracle, lambda x: x.cpu().double())


def trial(
    stack: Any,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
    check: Any,
    layout: Callable[[str, Tensor], Tensor] = plain_layout,
    label: str = "",
    at: str = "",
    scale: float = 1.0,
    loose: float = 1.0,
    ratio: float = 1.0,
    ratios: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Outcome:
    """Runs the role on trial forward and backward and judges every output and gradient.

    Measurements of one `label` share their names, so that the worst of many shapes is kept; `at`
    says which it was. `layout(name, tensor)` lays out inputs and, by the name "cotangent", the
    cotangents, which `scale` multiplies. All must stay as they were. `loose` multiplies the
    absolute bounds in float32, and `ratio` the error ratios, where inputs magnify rounding;
    `ratios`, (by RMS, by maximum), those of single results. Returns the role's own outcome.
    """
    tensors = {
        name: layout(name, x.to(device, case.dtypes.get(name, dtype))).requires_grad_()
        for name, x in case.tensors.items()
    }
    names = [short(dtype)] + ([label] if label else [])
    before = {name: x.detach().clone() for name, x in tensors.items()}
    forward = forward_of(case, getattr(stack, case.role), tensors)
    cotangents, scales = cotangents_of(case, forward, rng, scale)
    cotangents = {name: layout("cotangent", dy) for name, dy in cotangents.items()}
    kept = {name: dy.clone() for name, dy in cotangents.items()}
    plain, oracle = references(case, dtype, before, kept)
    own = own_rows(cotangents)

    def unchanged() -> None:
        changed = [name for name, x in before.items() if not torch.equal(x, tensors[name])]
        changed += [
            f"cotangent of {name}"
            for name, dy in kept.items()
            if not torch.equal(dy, cotangents[name])
        ]
        check(f"{' '.join(names)}: inputs and cotangents that were changed", changed, equal=[],
              because="others read them afterwards")  # fmt: skip

    def judge_all(*outcomes: dict[str, Tensor]) -> None:
        for name in outcomes[0]:
            # Rows are compared at one scale, or the largest would hide what is wrong in the others.
            rows = scales.get(case.by_row.get(name, "")) if own else None
            where = place(outcomes[0][name])  # a GPU compares a gradient of 2^28 elements at once
            results = [outcome[name].detach().to(where) for outcome in outcomes]
            same = results if rows is None else [x / rows.to(x) for x in results]
            judge(
                check,
                f"{' '.join(names)} {name}",
                dtype,
                *same,
                at=at,
                loose=loose,
                ratios=tuple(ratio * factor for factor in ratios.get(name, (1.0, 1.0))),
                shared=case.shared * (1 if own else num_alike(same[-1])),
            )

    unchanged()
    judge_all(forward, plain.forward, oracle.forward)
    without = [name for name in cotangents if not forward[name].requires_grad]
    check(f"{' '.join(names)}: outputs without a gradient", without, equal=[],
          because="what stands before the role would not be trained")  # fmt: skip
    backward = backward_of(forward, tensors, cotangents)
    unchanged()
    judge_all(backward, plain.backward, oracle.backward)
    return Outcome(forward, backward)


def num_alike(oracle: Tensor) -> int:
    """How many rows are the same, of those that have most like them: they share their rounding."""
    if oracle.ndim < 2 or not oracle.numel():
        return 1
    return int(oracle.flatten(0, -2).unique(dim=0, return_counts=True)[1].max())


def own_rows(cotangents: dict[str, Tensor]) -> bool:
    """Whether every row of the cotangents is its own, so that it has the scale that was drawn."""
    return not any(0 in dy.stride() for dy in cotangents.values())


def judge(
    check: Any,
    name: str,
    dtype: torch.dtype,
    got: Tensor,
    plain: Tensor,
    oracle: Tensor,
    *,
    at: str = "",
    loose: float = 1.0,
    ratios: tuple[float, ...] = (1.0, 1.0),
    shared: int = 1,
) -> None:
    """Shape, dtype, absolute bound, error ratios and sign bias of one result."""
    shape = f"; at {at}" if at else ""
    check(f"{name}: shape", list(got.shape), equal=list(oracle.shape), because="the formula's")
    check(f"{name}: dtype", str(got.dtype), equal=str(plain.dtype), because="the role's contract")
    if got.numel() == 0:
        return
    got, plain, oracle = got.detach().clone(), plain.detach(), oracle.detach()
    rms, largest = (factor * k for factor, k in zip(ratios, RATIOS[dtype], strict=True))
    if got.numel() == 1:  # the plain error of a single number may be small by luck
        units = (16 if got.dtype == torch.float32 else 2) * torch.finfo(got.dtype).eps
        check(f"{name}: relative error", relative_error(got, oracle),
              at_most=units + rms * relative_error(plain, oracle),
              because=f"16 units of float32, 2 of 16 bits, and {rms} times the plain formula's"
              f"{shape}")  # fmt: skip
        return
    magnified = loose if dtype == torch.float32 else 1.0  # also what one constant's rounding does
    absolute = ABSOLUTE[dtype] * magnified
    check(f"{name}: relative error", relative_error(got, oracle), at_most=absolute,
          because=f"the milestone's bound{shape}")  # fmt: skip
    check(f"{name}: error / plain error, RMS", error_ratio(got, plain, oracle), at_most=rms,
          because=RATIO_BECAUSE + shape)  # fmt: skip
    check(f"{name}: error / plain error, max", max_error_ratio(got, plain, oracle),
          at_most=largest, because=RATIO_BECAUSE + shape)  # fmt: skip
    allowed = magnified * bias_bound(dtype, oracle, shared) + 2 * abs(sign_bias(plain, oracle))
    check(f"{name}: sign bias", abs(sign_bias(got, oracle)), at_most=allowed,
          because="twice the plain formula's, and 6 standard errors of rounding to nearest; "
          f"truncation is off by half a unit{shape}")  # fmt: skip


def bias_bound(dtype: torch.dtype, oracle: Tensor, shared: int) -> float:
    """6 standard errors of the sum of roundings to nearest, relative to the sum of magnitudes.

    An element x is off by up to eps |x| / 2 either way: at most eps |x| / sqrt(12) as a rule. Where
    `shared` elements share the rounding of an operand, a sum has so many fewer of them. In float32
    what a row shares, such as its inverse RMS, does not average out within the row.
    """
    eps = torch.finfo(dtype).eps
    if dtype == torch.float32:
        return 8 * eps
    squares, sizes = (torch.linalg.vector_norm(oracle.double(), p) ** p for p in (2, 1))
    error = (shared * squares / 12).sqrt() / sizes
    return eps * min(1.0, 6 * float(error) + 1 / 64)
