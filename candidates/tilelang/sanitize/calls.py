"""What runs under the sanitizer: `python -m candidates.tilelang.sanitize.calls NAME`.

NAME is `operators`, each of them forward and backward at small shapes, or a program of PLANTED.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from candidates.tilelang import DTYPES, ROLES, gated_linear, projections
from candidates.tilelang.dialect import launches
from candidates.tilelang.sanitize.planted import PLANTED

EVERY_ROLE = {**ROLES, **projections.ROLES, **gated_linear.ROLES}
NUM_TOKENS = (1, 129)  # one, and one more than a tile
VOCABULARY = 1009
IGNORED = -100
CHANGED_BY_DETERMINISTIC_MODE = "attention"  # the role that then launches other kernels

Call = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def calls(num_tokens: int, dtype: torch.dtype, device: str) -> Iterator[Call]:
    """The name, a function and its differentiable inputs, for every role."""
    t = num_tokens
    positions = torch.arange(t, device=device)[None]
    labels = torch.arange(t, device=device) * 7 % VOCABULARY
    labels[::3] = IGNORED

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    roles = EVERY_ROLE
    yield "rms_norm", lambda x, w: roles["rms_norm"](x, w, 1e-6), (random(t, 896), random(896))
    yield (
        "add_rms_norm",
        lambda x, r, w: roles["add_rms_norm"](x, r, w, 1e-6),
        (random(t, 896), random(t, 896), random(896)),
    )
    yield "swiglu", roles["swiglu"], (random(t, 1003), random(t, 1003))
    yield "linear", roles["linear"], (random(t, 200), random(136, 200), random(136))
    yield (
        "projections",
        lambda x, a, b, c: roles["projections"](x, (a, b), (c, None)),
        (random(t, 200), random(136, 200), random(72, 200), random(136)),
    )
    yield (
        "gated_linear",
        roles["gated_linear"],
        (random(t, 200), random(136, 200), random(136, 200)),
    )
    yield (
        "token_nll",
        lambda h, w: roles["token_nll"](h, w, labels)[0],
        (random(t, 896), random(VOCABULARY, 896)),
    )
    for width in (32, 64, 128):
        heads = (random(1, t, 6, width), random(1, t, 2, width))
        yield "rope", lambda q, k: roles["rope"](q, k, positions, 1e4), heads
        for documents in (None, (positions // 50).int()):
            yield (
                "attention",
                lambda q, k, v, ids=documents: roles["attention"](q, k, v, ids),
                (*heads, random(1, t, 2, width)),
            )


def run_operators() -> set[str]:
    """Runs each call, with atomics and in order; returns the kernels that were not launched."""
    torch.manual_seed(0)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        for dtype in DTYPES["cuda"]:
            for num_tokens in NUM_TOKENS:
                for name, function, inputs in calls(num_tokens, dtype, "cuda"):
                    if deterministic and name != CHANGED_BY_DETERMINISTIC_MODE:
                        continue
                    result = function(*inputs)
                    outputs = result if isinstance(result, tuple) else (result,)
                    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
                    torch.cuda.synchronize()
                    print(f"{name}, {dtype}, {num_tokens} tokens", flush=True)
    named = {kernel for role in ROLES.values() for kernel in role.kernel_calls()}
    return named - set(launches)


def main(name: str) -> int:
    """Exit status 0; 3 if an operator's kernel was not among those that ran."""
    if name != "operators":
        PLANTED[name].run()
        torch.cuda.synchronize()
        return 0
    if missing := run_operators():
        print(f"not launched: {', '.join(sorted(missing))}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
