"""Memory that tells: inputs between NaN, allocations between guard bands, layouts of autograd, and
the peak of what is resident.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness import not_run

BAND = 64  # elements on each side
PATTERN = 77  # what guard bands hold: a number of every dtype
UNGUARDED = torch.empty


def framed(x: Tensor) -> Tensor:
    """A contiguous copy of a float tensor inside storage that is NaN around it.

    The copy begins `BAND` elements into its storage, so its offset is not zero.
    """
    storage = x.new_full((x.numel() + 2 * BAND,), torch.nan)
    inside = storage[BAND : BAND + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def transposed(x: Tensor) -> Tensor:
    """The last dimension is the outermost in memory."""
    if x.ndim < 2:
        return framed(x)
    return framed(x.movedim(-1, 0)).movedim(0, -1)


def sliced(x: Tensor) -> Tensor:
    """Every second element of storage that is NaN in between."""
    if x.ndim == 0:
        return framed(x)
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1).flatten(-2)[..., ::2]


def padded_rows(x: Tensor) -> Tensor:
    """Rows of the last dimension further apart than they are long, with NaN in between."""
    if x.ndim == 0:
        return framed(x)
    return torch.cat((x, torch.full_like(x[..., :1], torch.nan)), dim=-1)[..., :-1]


def outer_transposed(x: Tensor) -> Tensor:
    """The first two dimensions exchanged in memory, as heads and tokens are."""
    if x.ndim < 2:
        return framed(x)
    return framed(x.transpose(0, 1)).transpose(0, 1)


def one_row(x: Tensor) -> Tensor:
    """The first row for all rows, with stride 0: what broadcasting hands over."""
    return x[:1].clone().expand(x.shape) if x.ndim > 1 else framed(x)


def one_value(x: Tensor) -> Tensor:
    """The first value everywhere, with stride 0 in all dimensions: what .sum() hands over."""
    return x.flatten()[:1].clone().expand(x.shape) if x.ndim > 1 else framed(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": framed,
    "transposed": transposed,
    "outer-transposed": outer_transposed,
    "sliced": sliced,
    "padded-rows": padded_rows,
    "one-row": one_row,
    "one-value": one_value,
}


@dataclass
class Guards:
    """Allocations with bands around them."""

    storages: list[Tensor] = field(default_factory=list)

    def changed(self) -> int:
        """Band elements that do not hold the pattern any more."""
        return sum(
            int((storage[side] != PATTERN).sum())
            for storage in self.storages
            for side in (slice(None, BAND), slice(-BAND, None))
        )


@contextlib.contextmanager
def guarded_allocations() -> Iterator[Guards]:
    """Tensors that Python code allocates lie between bands; `Guards.changed` counts what is hit.

    torch.empty, empty_like, empty_strided, zeros, zeros_like and the methods new_empty and
    new_zeros return views into storage with bands of `PATTERN`; what is not zeros is filled with
    NaN or, for integers, with the pattern. Allocations inside of torch's own operators are not
    seen.
    """
    guards = Guards()
    with contextlib.ExitStack() as patches:
        for owner, name in (
            *((torch, n) for n in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like")),
            (Tensor, "new_empty"),
            (Tensor, "new_zeros"),
        ):
            patch = mock.patch.object(owner, name, _guarding(getattr(owner, name), name, guards))
            patches.enter_context(patch)
        yield guards


def _guarding(allocate: Callable[..., Tensor], name: str, guards: Guards) -> Callable[..., Tensor]:
    fill = 0 if "zeros" in name else torch.nan

    def guarded(*arguments: Any, **keywords: Any) -> Tensor:
        wanted = allocate(*arguments, **keywords)
        if wanted.is_meta or wanted.dtype == torch.bool or keywords.get("out") is not None:
            return wanted
        extent = 1 + sum(
            (n - 1) * s for n, s in zip(wanted.shape, wanted.stride(), strict=True)
        ) if wanted.numel() else 0  # fmt: skip
        storage = UNGUARDED(extent + 2 * BAND, dtype=wanted.dtype, device=wanted.device)
        storage.fill_(PATTERN)
        inside = storage[BAND : BAND + extent]
        inside.fill_(fill if wanted.is_floating_point() or fill == 0 else PATTERN)
        guards.storages.append(storage)
        tensor = inside.as_strided(wanted.shape, wanted.stride(), BAND)
        return tensor.requires_grad_(wanted.requires_grad)

    return guarded


def require_peak_bytes() -> None:
    """The gate is NOT_RUN where `peak_bytes` cannot be measured."""
    if not (Path("/proc/self/clear_refs").exists() and hasattr(ctypes.CDLL(None), "malloc_trim")):
        not_run("The peak of resident memory is read from Linux's /proc, with glibc's malloc_trim.")


def reset_peak_bytes() -> int:
    """Resident bytes now, from which `peak_bytes` counts anew.

    What earlier tests freed goes back to the system first: used again, it would not be counted.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most that was resident since `reset_peak_bytes`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
