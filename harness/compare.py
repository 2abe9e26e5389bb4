"""How far two results are apart. Everything is compared in float64: on the device where both are,
if it has float64, else on the CPU.

Every function refuses, with a ValueError, what would compare nothing or the wrong things:
different shapes, no element, different names, a result compared with its own memory. NaN in
either argument makes the distance NaN, which fails every bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from harness.devices import has_float64

PIECE = 2**18  # elements whose float64 copies stay in a processor's cache


def place(*tensors: Tensor) -> torch.device:
    """Where these tensors are compared: on the device that they share, else on the CPU."""
    first, *others = {tensor.device for tensor in tensors}
    return first if not others and has_float64(first.type) else torch.device("cpu")


def _refuse(got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    if got.numel() == 0:
        raise ValueError(f"nothing to compare: shape {tuple(got.shape)} has no element")
    if not (got.is_floating_point() and want.is_floating_point()):
        raise ValueError(
            f"distances are between floats; got {got.dtype} and {want.dtype}. Integers are "
            "compared exactly, complex numbers by their real and imaginary parts"
        )
    if got.data_ptr() == want.data_ptr() and got.device == want.device:
        raise ValueError("both results are the same memory; clone one before it is overwritten")


def _split(x: Tensor, where: torch.device) -> Iterable[Tensor]:
    """Pieces whose float64 copies are small, so that memory does not grow with the tensor."""
    return torch.split(x.detach().to(where).flatten(), PIECE)


def _pairs(got: Tensor, want: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Pieces of both in float64, at the same places."""
    _refuse(got, want)
    where = place(got, want)
    for mine, theirs in zip(_split(got, where), _split(want, where), strict=True):
        yield mine.double(), theirs.double()


def _norm(pieces: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all pieces together, float64 on the CPU."""
    return torch.stack([piece.double().square().sum() for piece in pieces]).sum().sqrt().cpu()


def _largest(pieces: Iterable[Tensor]) -> float:
    """The largest magnitude in all pieces; unlike the built-in max, it hands NaN on."""
    return float(torch.stack([piece.abs().max() for piece in pieces]).max())


def _distance(got: Tensor, want: Tensor) -> Tensor:
    """``||got - want||`` in the 2-norm."""
    return _norm(mine - theirs for mine, theirs in _pairs(got, want))


def relative_error(got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||`` in the 2-norm; 0 if both are zero, inf if only want is."""
    difference = _distance(got, want)
    return 0.0 if difference == 0 else float(difference / _norm(_split(want, place(want))))


def max_abs_error(got: Tensor, want: Tensor) -> float:
    """``max |got - want|``."""
    return _largest(mine - theirs for mine, theirs in _pairs(got, want))


def worst_relative(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest ``relative_error`` over tensors of the same name; NaN if any is NaN."""
    if got.keys() != want.keys() or not want:
        raise ValueError(
            f"names differ or there are none: only got {sorted(got.keys() - want.keys())}, "
            f"only want {sorted(want.keys() - got.keys())}"
        )
    errors = torch.tensor([relative_error(got[name], want[name]) for name in want])
    return float(errors.max())  # unlike the built-in max, it hands NaN on


def _roundings(oracle: Tensor, dtype: torch.dtype) -> Iterable[Tensor]:
    """The errors of merely storing ``oracle`` in ``dtype``."""
    if oracle.numel() == 0:
        raise ValueError("nothing to compare: the oracle has no element")
    for piece in _split(oracle, place(oracle)):
        exact = piece.double()
        yield exact.to(dtype).double() - exact


def rounding_floor(oracle: Tensor, dtype: torch.dtype) -> float:
    """The error of merely storing ``oracle`` in ``dtype``, as a root mean square."""
    return float(_norm(_roundings(oracle, dtype)) / oracle.numel() ** 0.5)


def error_ratio(got: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """RMS error of a candidate over that of the plain formula in the same dtype.

    ``rms(got - oracle) / (rms(plain - oracle) + floor)``; the floor is the error of storing the
    oracle in the candidate's dtype, so that a lucky plain result does not make the bound zero.
    """
    root = oracle.numel() ** 0.5
    error = _distance(got, oracle) / root
    accepted = _distance(plain, oracle) / root + rounding_floor(oracle, got.dtype)
    return 0.0 if error == 0 else float(error / accepted)


def max_error_ratio(got: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """Largest error of a candidate over that of the plain formula in the same dtype.

    ``max |got - oracle| / (max |plain - oracle| + floor)``, the floor as in ``error_ratio`` but for
    its largest element: one wrong element in a million, which a mean forgives, decides.
    """
    accepted = max_abs_error(plain, oracle) + _largest(_roundings(oracle, got.dtype))
    error = max_abs_error(got, oracle)
    return 0.0 if error == 0 else float(torch.tensor(error, dtype=torch.float64) / accepted)


def sign_bias(got: Tensor, oracle: Tensor) -> float:
    """How much larger the magnitudes of ``got`` are on the whole, relative to the oracle's.

    ``sum sign(oracle) (got - oracle) / sum |oracle|``. Errors of rounding to nearest point either
    way and cancel as 1 / sqrt(elements); truncation, or a lost term, points one way and does not.
    """
    sums = [
        torch.stack(((theirs.sign() * (mine - theirs)).sum(), theirs.abs().sum()))
        for mine, theirs in _pairs(got, oracle)
    ]
    bias, size = torch.stack(sums).sum(0)
    return 0.0 if bias == 0 else float(bias / size)
