"""What runs under the sanitizer: `python -m candidates.tilelang.sanitize.calls NAME`.

NAME is OPERATORS, each of them forward and backward at small shapes, or a program of PLANTED. The
last line is FINISHED once all of it has run.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from candidates.tilelang import DTYPES, ROLES, gated_linear, projections
from candidates.tilelang.dialect import launches
from candidates.tilelang.sanitize.planted import PLANTED
from candidates.tilelang.token_nll_labels import NO_TARGET

OPERATORS = "operators"
FINISHED = "all kernels were launched"
EVERY_ROLE = {**ROLES, **projections.ROLES, **gated_linear.ROLES}
NUM_TOKENS = (1, 129)  # one, and one more than a tile
VOCABULARY = 1009

Call = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def calls(num_tokens: int, dtype: torch.dtype, device: str) -> Iterator[Call]:
    """The name, a function and its differentiable inputs, for every role."""
    t = num_tokens
    positions = torch.arange(t, device=device)[None]
    labels = torch.arange(t, device=device) * 7 % VOCABULARY
    labels[1::3] = NO_TARGET

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    yield "rms_norm", lambda x, w: EVERY_ROLE["rms_norm"](x, w, 1e-6), (random(t, 896), random(896))
    yield (
        "add_rms_norm",
        lambda x, r, w: EVERY_ROLE["add_rms_norm"](x, r, w, 1e-6),
        (random(t, 896), random(t, 896), random(896)),
    )
    yield "swiglu", EVERY_ROLE["swiglu"], (random(t, 1003), random(t, 1003))
    yield "linear", EVERY_ROLE["linear"], (random(t, 200), random(136, 200), random(136))
    yield (
        "projections",
        lambda x, a, b, c: EVERY_ROLE["projections"](x, (a, b), (c, None)),
        (random(t, 200), random(136, 200), random(72, 200), random(136)),
    )
    yield (
        "gated_linear",
        EVERY_ROLE["gated_linear"],
        (random(t, 200), random(136, 200), random(136, 200)),
    )
    yield (
        "token_nll",
        lambda h, w: EVERY_ROLE["token_nll"](h, w, labels)[0],
        (random(t, 896), random(VOCABULARY, 896)),
    )
    for width in (32, 64, 128):
        heads = (random(1, t, 6, width), random(1, t, 2, width))
        yield "rope", lambda q, k: EVERY_ROLE["rope"](q, k, positions, 1e4), heads
        for documents in (None, (positions // 50).int()):
            yield (
                "attention",
                lambda q, k, v, ids=documents: EVERY_ROLE["attention"](q, k, v, ids),
                (*heads, random(1, t, 2, width)),
            )


def run_operators() -> set[str]:
    """Runs each call, attention's deterministic too; returns the kernels that were not launched."""
    torch.manual_seed(0)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        for dtype in DTYPES["cuda"]:
            for num_tokens in NUM_TOKENS:
                for name, function, inputs in calls(num_tokens, dtype, "cuda"):
                    if deterministic and name != "attention":  # the others are the same in it
                        continue
                    result = function(*inputs)
                    outputs = result if isinstance(result, tuple) else (result,)
                    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
                    torch.cuda.synchronize()
                    print(f"{name}, {dtype}, {num_tokens} tokens", flush=True)
    named = {kernel for role in ROLES.values() for kernel in role.kernel_calls()}
    return named - set(launches)


def main(name: str) -> int:
    """Exit status 0, or 1 if an operator's kernel was not among those that ran."""
    if name != OPERATORS:
        PLANTED[name].run()
    elif missing := run_operators():
        print(f"not launched: {', '.join(sorted(missing))}")
        return 1
    print(FINISHED, flush=True)
    torch.cuda.synchronize()  # raises where a tool has stopped a kernel
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
