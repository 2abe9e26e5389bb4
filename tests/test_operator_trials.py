"""The tools of the operator gates: what they plant in memory is there, and what hits it is seen."""

import pytest
import torch

from gates import operators
from gates.memory import BAND, LAYOUTS, framed, guarded_allocations
from gates.operator_cases import EXAMPLES, ODD_EXAMPLES, VARIED
from harness.checks import Check, CheckFailed
from harness.contract import Stack
from reference import ops
from reference.stack import OPERATORS, ROLES

STACK = Stack(ROLES, (torch.float64, torch.float32, torch.bfloat16, torch.float16))
CPU = torch.device("cpu")


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values_and_change_the_memory(layout, rng):
    x = torch.randn(5, 4, 6, generator=rng)
    laid = LAYOUTS[layout](x)
    assert laid.shape == x.shape
    if layout in ("one-row", "one-value"):
        assert 0 in laid.stride() and torch.equal(laid[0, 0, 0], x[0, 0, 0])
    else:
        assert torch.equal(laid, x)
        dense = laid.stride() == torch.empty(x.shape).stride() and laid.storage_offset() == 0
        assert not dense


def test_around_a_framed_tensor_there_is_nan(rng):
    x = framed(torch.randn(3, 4, generator=rng))
    memory = x.as_strided((12 + 2 * BAND,), (1,), 0)
    assert memory.isnan().sum() == 2 * BAND and not x.isnan().any()


def test_fresh_memory_is_nan_and_its_bands_are_watched():
    with guarded_allocations() as guards:
        made = [torch.empty(3, 4), torch.empty_like(torch.ones(5)), torch.ones(2).new_empty(7)]
        zeros = [torch.zeros(3), torch.zeros_like(torch.ones(2, 2)), torch.ones(2).new_zeros(4)]
        whole = torch.empty(6, dtype=torch.int32)
    assert all(x.isnan().all() for x in made)
    assert not any(x.any() for x in zeros)
    assert len(guards.storages) == 7 and guards.changed() == 0
    for x in (*made, *zeros, whole):
        x.fill_(1)
    assert guards.changed() == 0
    made[0].as_strided((1,), (1,), made[0].storage_offset() + 12).fill_(0.0)
    whole.as_strided((1,), (1,), whole.storage_offset() - 1).fill_(0)
    assert guards.changed() == 2
    assert torch.empty(3).storage_offset() == 0, "the patches are gone"


def test_writing_the_pattern_of_the_bands_is_the_only_way_to_hide():
    with guarded_allocations() as guards:
        x = torch.empty(4)
    x.as_strided((1,), (1,), x.storage_offset() + 4).fill_(float("nan"))
    assert guards.changed() == 1


def test_there_are_cases_of_every_operator():
    assert set(EXAMPLES) == set(ODD_EXAMPLES) == set(VARIED) == set(OPERATORS)


@pytest.mark.parametrize("role", OPERATORS)
def test_the_reference_passes_its_own_trial_with_room(role, rng):
    check = Check()
    for dtype in operators.dtypes(STACK):
        operators.trial(STACK, EXAMPLES[role](rng), dtype, CPU, rng, check)
    measured = check.measurements.values()
    ratios = [m["value"] / m["bound"]["at_most"] for m in measured if m["bound"].get("at_most")]
    assert len(ratios) > 6 and max(ratios) <= 0.5


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_wrong_element_fails_a_trial(phase, rng):
    def swiglu(gate, up):
        h = ops.swiglu(gate, up)
        nudge = torch.zeros_like(h)
        nudge.view(-1)[7] = 1e-3
        if phase == "forward":
            return h + nudge
        return h + nudge * (gate - gate.detach())

    stack = STACK.replace({"swiglu": swiglu})
    with pytest.raises(CheckFailed, match=f"float32 {'h' if phase == 'forward' else 'dgate'}"):
        operators.trial(stack, EXAMPLES["swiglu"](rng), torch.float32, CPU, rng, Check())


def test_a_trial_asks_for_declared_dtypes_but_never_for_float64():
    only = Stack(ROLES, (torch.float64, torch.float16))
    assert operators.dtypes(only) == [torch.float16]
    with pytest.raises(pytest.skip.Exception, match="declares none of float32"):
        operators.dtypes(Stack(ROLES, (torch.float64,)))
