"""M4. Operators again and again: the same bits, no stale kernel, and the kernel by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gates import fresh_process, operators
from gates.operator_cases import EXAMPLES, VARIED, attention_case
from harness import gate

ROLES = list(EXAMPLES)
NUM_REPEATS = 30


class Prepared:
    """An example's tensors on the device and a cotangent for each output, to run it many times."""

    def __init__(self, stack, case, dtype, device, rng):
        self.case, self.role = case, getattr(stack, case.role)
        self.tensors = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
        with torch.no_grad():
            forward = operators.forward_of(case, operators.ROLES[case.role], self.tensors)
        self.cotangents, _ = operators.cotangents_of(case, forward, rng)

    def results(self):
        """Outputs and gradients by name."""
        forward = operators.forward_of(self.case, self.role, self.tensors)
        backward = operators.backward_of(forward, self.tensors, self.cotangents)
        return {name: x.detach() for name, x in (forward | backward).items()}


def cases_of(role, rng, device):
    """A small case; on a GPU others, and rows of many tiles, whose parts of dq meet anyhow."""
    cases = [EXAMPLES[role](rng)]
    if device.type != "cpu":
        cases += VARIED[role](rng)
    if role == "attention" and device.type != "cpu":
        documents_BT = (torch.arange(515, dtype=torch.int32) // 130).expand(2, -1)
        for width in (64, 128):
            cases += [attention_case(rng, d, (2, 515, 4, 2, width)) for d in (None, documents_BT)]
    return cases


def differing(some, others):
    """Elements whose bits differ, over all results."""
    return sum(int((~same_bits(some[name], others[name])).sum()) for name in some)


def same_bits(x, y):
    return (x == y) | (x.isnan() & y.isnan())


@gate(
    claim="with deterministic algorithms on, 30 runs forward and backward give the same bits",
    roles=ROLES,
    not_claimed="the same bits on other devices or versions",
    source="Dao-AILab/flash-attention#414, #988 (dQ by atomics), tile-ai/tilelang#2556, #2699 "
    "(races: a barrier lost, a tile not cleared)",
)
@pytest.mark.parametrize("role", ROLES)
def test_same_bits(stack, role, rng, device, check):
    for dtype in operators.dtypes(stack):
        prepared = Prepared(stack, EXAMPLES[role](rng), dtype, device, rng)
        first = prepared.results()
        for _ in range(NUM_REPEATS - 1):
            check(f"{operators.short(dtype)}: elements that differ from the first run",
                  differing(prepared.results(), first), equal=0,
                  because="deterministic algorithms were asked for")  # fmt: skip


@gate(
    claim="with deterministic algorithms off, as users train, 30 runs stay within 1e-4 of the "
    "deterministic one in float32 and one rounding in 16 bits",
    roles=ROLES,
    not_claimed="the same bits; atomics may add in any order",
    source="Dao-AILab/flash-attention#2244: 1.2e-4 in 29 of 30 runs",
)
@pytest.mark.parametrize("role", ROLES)
def test_default_mode(stack, role, rng, device, check):
    for dtype in operators.dtypes(stack):
        for case in cases_of(role, rng, device):
            prepared = Prepared(stack, case, dtype, device, rng)
            want = prepared.results()
            torch.use_deterministic_algorithms(False)
            try:
                runs = [prepared.results() for _ in range(NUM_REPEATS)]
            finally:
                torch.use_deterministic_algorithms(True)
            at = str([list(x.shape) for x in case.tensors.values()])
            for got in runs:
                for name, x in got.items():
                    spread = (x.double() - want[name].double()).norm() / want[name].double().norm()
                    check(f"{operators.short(dtype)} {name}: relative change", spread,
                          at_most=max(1e-4, torch.finfo(dtype).eps),
                          because="the order of float32 sums; a race loses whole tiles; "
                          f"at {at}")  # fmt: skip


@gate(
    claim="calls with other shapes, dtypes and constants in between change no bit, and each call "
    "has its own values",
    roles=ROLES,
    not_claimed="how many kernels are kept",
    source="tile-ai/tilelang#1250, #2791, PR#565: cache keys without the size, the flags or the "
    "tuned parameters",
)
@pytest.mark.parametrize("role", ROLES)
def test_many_configurations(stack, role, rng, device, check):
    cases = [EXAMPLES[role](rng), *VARIED[role](rng)]
    prepared = [
        Prepared(stack, case, dtype, device, rng)
        for case in cases
        for dtype in operators.dtypes(stack)
    ]
    first = [one.results() for one in prepared]
    for one, before in reversed(list(zip(prepared, first, strict=True))):
        check("elements that other calls in between changed", differing(one.results(), before),
              equal=0, because="a call depends on its arguments alone")  # fmt: skip
    for one, got in zip(prepared, first, strict=True):
        dtype = next(iter(one.tensors.values())).dtype
        plain, oracle = operators.references(one.case, dtype, one.tensors, one.cotangents)
        references = [outcome.forward | outcome.backward for outcome in (plain, oracle)]
        for name, x in got.items():
            at = str([list(t.shape) for t in one.tensors.values()])
            operators.judge(check, f"{operators.short(dtype)} {name}", dtype, x,
                            *(r[name] for r in references), at=at,
                            shared=one.case.shared)  # fmt: skip


@gate(
    claim="another process, which finds the kernels of this one on disk, computes the same bits",
    roles=ROLES,
    not_claimed="another machine",
    source="tile-ai/tilelang#2662, PR#1977: a key that holds the process's history, or not enough",
)
def test_second_process(stack, recipe, rng, device, check):
    dtype = operators.dtypes(stack)[0]
    prepared = {}
    for role in ROLES:
        for case in (EXAMPLES[role](rng), *VARIED[role](rng)):
            prepared[f"{role} {len(prepared)}"] = Prepared(stack, case, dtype, device, rng)
    here = {name: one.results() for name, one in prepared.items()}
    jobs = {name: Job.of(one) for name, one in prepared.items()}
    there = fresh_process.call(recipe, results_of_jobs, device, jobs)
    check("results of the other process", sorted(there), equal=sorted(here), because="all of them")
    for name, results in here.items():
        on_cpu = {key: x.cpu() for key, x in results.items()}
        check(f"{name.split()[0]}: elements that differ in another process",
              differing(on_cpu, there[name]), equal=0,
              because="the same arguments on the same device")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What another process needs of a Prepared: names of what comes in and out, and tensors."""

    role: str
    arguments: tuple[Any, ...]
    inputs: list[str]
    outputs: tuple[str, ...]
    cotangents: dict[str, torch.Tensor]

    @classmethod
    def of(cls, one):
        case = one.case
        return cls(case.role, case.arguments(one.tensors), list(one.tensors), case.outputs,
                   one.cotangents)  # fmt: skip


def results_of_jobs(stack, jobs):
    """Outputs and gradients of every job by name, on the CPU."""
    return {name: results_of(getattr(stack, job.role), job) for name, job in jobs.items()}


def results_of(role, job):
    outputs = role(*job.arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    forward = dict(zip(job.outputs, outputs, strict=True))
    inputs = [x for x in tree_leaves(job.arguments) if getattr(x, "requires_grad", False)]
    wanted = [forward[name] for name in job.cotangents]
    gradients = torch.autograd.grad(wanted, inputs, list(job.cotangents.values()))
    backward = {f"d{name}": x for name, x in zip(job.inputs, gradients, strict=True)}
    results = {**{name: forward[name] for name in job.cotangents}, **backward}
    return {name: x.detach().cpu() for name, x in results.items()}


@gate(
    claim="a retained graph gives the same gradients again, bit for bit, and leaves those that it "
    "gave before as they were",
    roles=ROLES,
    not_claimed="gradients of gradients",
    source="torch.autograd.grad, retain_graph; linkedin/Liger-Kernel: element_mul_kernel and "
    "LigerSiLUMulFunction store gradients into what the forward had saved",
)
@pytest.mark.parametrize("role", ROLES)
def test_second_backward(stack, role, rng, device, check):
    for dtype in operators.dtypes(stack):
        prepared = Prepared(stack, EXAMPLES[role](rng), dtype, device, rng)
        forward = operators.forward_of(prepared.case, prepared.role, prepared.tensors)

        def gradients(factor, retain_graph=True, prepared=prepared, forward=forward):
            scaled = {name: factor * dy for name, dy in prepared.cotangents.items()}
            return operators.backward_of(forward, prepared.tensors, scaled, retain_graph)

        first = gradients(1.0)
        copies = {name: x.clone() for name, x in first.items()}
        for factor in (0.5, 0.25):
            gradients(factor)
        again = gradients(1.0)
        gradients(0.125, retain_graph=False)  # the only one that may use what was saved as its own
        for name, got in (("first", first), ("fourth", again)):
            check(f"{operators.short(dtype)}: elements of the {name} gradients that differ",
                  differing(got, copies), equal=0,
                  because="one graph, the same cotangents, and others hold them")  # fmt: skip


@gate(
    claim="where inputs are frozen, all but one or one alone, the others' gradients have the same "
    "bits as when none is",
    roles=ROLES,
    not_claimed="that less is computed then",
    source="torch.autograd: needs_input_grad; LoRA freezes weights, the first layer has no dx",
)
@pytest.mark.parametrize("role", ROLES)
def test_frozen(stack, role, rng, device, check):
    for dtype in operators.dtypes(stack):
        prepared = Prepared(stack, EXAMPLES[role](rng), dtype, device, rng)
        want, names = prepared.results(), list(prepared.tensors)
        for wanted in [{name} for name in names] + [set(names) - {name} for name in names]:
            for name, x in prepared.tensors.items():
                x.requires_grad_(name in wanted)
            forward = operators.forward_of(prepared.case, prepared.role, prepared.tensors)
            outputs = {name: y for name, y in forward.items() if y.requires_grad}
            trained = {name: x for name, x in prepared.tensors.items() if name in wanted}
            cotangents = {name: prepared.cotangents[name] for name in outputs}
            check(f"{operators.short(dtype)}: outputs with a gradient", len(outputs), at_least=1,
                  because="each input is part of one")  # fmt: skip
            found = operators.backward_of(outputs, trained, cotangents)
            check(f"{operators.short(dtype)}: elements that differ", differing(found, want),
                  equal=0, because="the same products and sums")  # fmt: skip


@gate(
    claim="under activation checkpointing, where the forward runs again in the backward, outputs "
    "and gradients have the same bits",
    roles=ROLES,
    not_claimed="operators that draw random numbers",
    source="allenai/OLMo-core PR#828, pytorch/torchtitan#1323: another draw in the second forward",
)
@pytest.mark.parametrize("role", ROLES)
def test_checkpointing(stack, role, rng, device, check):
    for dtype in operators.dtypes(stack):
        prepared = Prepared(stack, EXAMPLES[role](rng), dtype, device, rng)
        want, plain_role = prepared.results(), prepared.role

        def again(*arguments, role=plain_role):
            return checkpoint(role, *arguments, use_reentrant=False)

        prepared.role = again
        check(f"{operators.short(dtype)}: elements that checkpointing changed",
              differing(prepared.results(), want), equal=0,
              because="the same operations twice")  # fmt: skip


@gate(
    claim="an operator that names its kernels launches them in the forward and in the backward: no "
    "quiet fallback",
    roles=ROLES,
    not_claimed="anything about operators without `kernel_calls`: plain torch needs no kernel",
    source="verl-project/verl PR#6330: a fused SwiGLU whose flag was set and which never ran",
)
@pytest.mark.parametrize("role", ROLES)
def test_kernels_ran(stack, role, rng, device, check):
    function = getattr(stack, role)
    calls = getattr(function, "kernel_calls", None)
    if calls is None:
        check("kernels", "none named", equal="none named", because="plain torch")
        return
    for dtype in operators.dtypes(stack):
        prepared = Prepared(stack, EXAMPLES[role](rng), dtype, device, rng)
        counts = [calls()]
        forward = operators.forward_of(prepared.case, function, prepared.tensors)
        counts.append(calls())
        operators.backward_of(forward, prepared.tensors, prepared.cotangents)
        counts.append(calls())
        for phase, before, after in (("forward", *counts[:2]), ("backward", *counts[1:])):
            launched = {name: n - before.get(name, 0) for name, n in after.items()}
            ran = sorted(name for name, n in launched.items() if n > 0)
            name = f"{operators.short(dtype)} {phase}"
            check(f"{name}: launches of {', '.join(ran) or 'no kernel'}", sum(launched.values()),
                  at_least=1, because="a kernel that does not run is not on trial")  # fmt: skip
