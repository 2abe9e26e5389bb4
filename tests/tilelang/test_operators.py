"""The TileLang operators but attention: right, operators of torch, with named limits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from candidates.tilelang import ROLES as TILELANG
from candidates.tilelang import (
    dialect,
    gated_linear,
    linear,
    matrix,
    projections,
    rms_norm,
    rope,
    swiglu,
    token_nll,
    token_nll_chunks,
)
from candidates.tilelang.fast import ROLES as FAST
from candidates.tilelang.saved import may_write_over
from reference import loss, ops

ROLES = {**FAST, **TILELANG}
I, O, V, D = 7, 9, 11, 8  # noqa: E741  few static widths: each costs seconds to compile


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rope_inputs(dtype):
    positions = torch.tensor([[0, 1, 70000, 5, 131071]])
    return (normal(1, 5, 4, 6, dtype=dtype), normal(1, 5, 2, 6, dtype=dtype), positions, 1e6)


CASES = {
    "rms_norm": (ops.rms_norm, lambda dtype: (
        normal(3, 5, D, dtype=dtype), normal(D, dtype=dtype), 1e-6)),
    "add_rms_norm": (ops.add_rms_norm, lambda dtype: (
        normal(3, 5, D, dtype=dtype), normal(5, 3, D, dtype=dtype).transpose(0, 1),
        normal(D, dtype=dtype), 1e-6)),
    "rope": (ops.rope, rope_inputs),
    "swiglu": (ops.swiglu, lambda dtype: (
        normal(5, 7, dtype=dtype), 3 * normal(7, 5, dtype=dtype).T)),
    "linear": (ops.linear, lambda dtype: (
        normal(3, 5, I, dtype=dtype), normal(O, I, dtype=dtype), normal(O, dtype=dtype))),
    "projections": (ops.projections, lambda dtype: (
        normal(3, 5, I, dtype=dtype), [normal(O, I, dtype=dtype), normal(I, I, dtype=dtype)],
        [normal(O, dtype=dtype), None])),
    "gated_linear": (ops.gated_linear, lambda dtype: (
        normal(3, 5, I, dtype=dtype), normal(O, I, dtype=dtype), 2 * normal(O, I, dtype=dtype))),
    "token_nll": (loss.token_nll, lambda dtype: (
        8 * normal(5, D, dtype=dtype), normal(V, D, dtype=dtype),
        torch.tensor([-100, 3, 0, 10, -100]))),
}  # fmt: skip


def run(role, inputs, dtype=None):
    """Outputs, and gradients for cotangents that are 0.37 times the same random numbers."""
    floats = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731
    given, shape = tree_flatten(inputs)
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() if floats(x) else x for x in given]
    outputs = role(*tree_unflatten(leaves, shape))
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if floats(y)]
    cotangents = [(0.37 * normal(*y.shape)).to(y.dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, [x for x in leaves if floats(x)], cotangents)
    return [x.detach().double() for x in (*outputs, *gradients)]


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_outputs_and_gradients_are_about_as_near_the_oracle_as_plain_torch(name, dtype):
    reference, make = CASES[name]
    inputs = make(dtype)
    want = run(reference, inputs, torch.float64)
    floor = torch.finfo(dtype).eps
    for got, plain, exact in zip(
        run(ROLES[name], inputs), run(reference, inputs), want, strict=True
    ):
        assert error(got, exact) <= 3 * error(plain, exact) + floor


OPERATORS = {
    "rms_norm": (rms_norm._rms_norm, lambda: (normal(5, D), normal(D), 1e-6)),
    "add_rms_norm": (rms_norm._add_rms_norm, lambda: (normal(5, D), normal(5, D), normal(D), 1e-6)),
    "rope": (rope._rope, lambda: rope_inputs(torch.float32)),
    "swiglu": (swiglu.swiglu_values, lambda: (normal(5, 7), normal(5, 7))),
    "linear": (linear._linear, lambda: (normal(3, I), normal(O, I), normal(O))),
    "linear without bias": (linear._linear, lambda: (normal(3, I), normal(O, I), None)),
    "projections": (projections._projections, lambda: (
        normal(3, I), [normal(O, I), normal(I, I)], [normal(O), normal(I)])),
    "projections without biases": (projections._projections, lambda: (
        normal(3, I), [normal(O, I), normal(I, I)], [])),
    "gated_linear": (gated_linear._gated_linear, lambda: (
        normal(3, I), normal(O, I), normal(O, I))),
    "token_nll": (token_nll._token_nll, lambda: (
        normal(5, D), normal(V, D), torch.tensor([1, 2, -100, 10, 0]), [True, True])),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_schema_fake_kernel_and_gradient_in_order(name):
    operator, make = OPERATORS[name]
    inputs, shape = tree_flatten(make())
    for x in inputs:
        if getattr(x, "is_floating_point", bool)():
            x.requires_grad_()
    torch.library.opcheck(operator, tree_unflatten(inputs, shape))


@pytest.mark.parametrize("name", CASES)
def test_torch_compile_takes_the_role_whole(name):
    inputs = CASES[name][1](torch.float32)
    whole = torch.compile(ROLES[name], backend="aot_eager", fullgraph=True)
    for got, want in zip(run(whole, inputs), run(ROLES[name], inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_autocast_leaves_the_dtypes_that_a_role_was_given(name):
    inputs = CASES[name][1](torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(ROLES[name], inputs)
    for got, want in zip(cast, run(ROLES[name], inputs), strict=True):
        assert torch.equal(got, want)


# Modules whose backward may write over what was saved, and which of the saved tensors.
REUSING = [("token_nll", token_nll, 1), *(("gated_linear", gated_linear, i) for i in (3, 4))]


@pytest.mark.parametrize(("name", "module", "place"), REUSING)
@pytest.mark.parametrize("who", ["nobody else", "a retained graph", "somebody"])
def test_saved_memory_is_used_again_where_nobody_else_wants_it(
    name, module, place, who, monkeypatch
):
    answers = []

    def noting(*given):
        answers.append(may_write_over(*given))
        return answers[-1]

    monkeypatch.setattr(module, "may_write_over", noting)
    leaves = [x for x in CASES[name][1](torch.float32) if x.is_floating_point()]
    others = [x for x in CASES[name][1](torch.float32) if not x.is_floating_point()]
    output = ROLES[name](*(x.requires_grad_() for x in leaves), *others)
    output = output[0] if isinstance(output, tuple) else output
    held = output.grad_fn.saved_tensors[place] if who == "somebody" else None
    before = None if held is None else held.clone()
    torch.autograd.grad(output, leaves, 0.5 * output.detach(), who == "a retained graph")
    assert answers[-1] == (who == "nobody else")
    assert held is None or torch.equal(held, before)


def test_cotangents_of_the_loss_may_come_in_a_batch():
    hidden, weight, labels = CASES["token_nll"][1](torch.float32)
    hidden.requires_grad_()
    factors, found = torch.tensor([1.0, 2.0]), []
    for role in (ROLES["token_nll"], loss.token_nll):
        nll = role(hidden, weight, labels)[0]
        found += torch.autograd.grad(nll, [hidden], factors, is_grads_batched=True)
    assert error(*found) < 1e-6


def test_the_backward_of_the_loss_allocates_nothing_as_large_as_its_gradients():
    class Allocations(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if any(name in str(function) for name in ("empty", "zeros", "scaled", "clone")):
                self.largest = max(self.largest, made.numel())
            return made

    hidden, weight, labels = CASES["token_nll"][1](torch.float32)
    nll = ROLES["token_nll"](hidden.requires_grad_(), weight.requires_grad_(), labels)[0]
    with Allocations() as made:
        nll.backward()
    assert made.largest <= 1


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_norm_of_which_one_output_is_used_has_that_one_s_gradients(wanted):
    leaves = [normal(5, D).requires_grad_(), normal(5, D).requires_grad_()]
    found = [
        torch.autograd.grad(role(*leaves, normal(D), 1e-6)[wanted].square().sum(), leaves)
        for role in (ROLES["add_rms_norm"], ops.add_rms_norm)
    ]
    assert all(error(got, want) < 1e-6 for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_an_empty_input_gives_an_empty_output_and_zero_gradients(name):
    inputs = {
        "rms_norm": lambda: (normal(2, 0, D), normal(D), 1e-6),
        "add_rms_norm": lambda: (normal(0, D), normal(0, D), normal(D), 1e-6),
        "rope": lambda: (normal(2, 0, 4, 6), normal(2, 0, 2, 6), torch.zeros(2, 0).long(), 1e4),
        "swiglu": lambda: (normal(0, 5), normal(0, 5)),
        "linear": lambda: (normal(0, I), normal(O, I), normal(O)),
        "projections": lambda: (normal(0, I), [normal(O, I), normal(I, I)], [normal(O), None]),
        "gated_linear": lambda: (normal(0, I), normal(O, I), normal(O, I)),
        "token_nll": lambda: (normal(0, D), normal(V, D), torch.zeros(0).long()),
    }[name]()
    assert all(not x.any() for x in run(ROLES[name], inputs))


LIMITS = {
    "rms_norm, gain": ("weight must be", "rms_norm", lambda: (normal(2, D), normal(D + 1), 1e-6)),
    "rms_norm, width": ("1 to 16384", "rms_norm", lambda: (
        normal(1, 16385), normal(16385), 1e-6)),
    "add_rms_norm, residual": ("residual must be", "add_rms_norm", lambda: (
        normal(2, D), normal(1, D), normal(D), 1e-6)),
    "rope, odd width": ("even", "rope", lambda: (
        normal(1, 2, 1, 5), normal(1, 2, 1, 5), torch.zeros(1, 2).long(), 1e4)),
    "rope, int32 positions": ("int64", "rope", lambda: (
        normal(1, 2, 1, 4), normal(1, 2, 1, 4), torch.zeros(1, 2).int(), 1e4)),
    "swiglu, shapes": ("alike", "swiglu", lambda: (normal(2, 3), normal(3, 2))),
    "swiglu, float64": ("float32, float16", "swiglu", lambda: (
        normal(2).double(), normal(2).double())),
    "swiglu, bfloat16 on the CPU": ("float32, float16", "swiglu", lambda: (
        normal(2).bfloat16(), normal(2).bfloat16())),
    "linear, inner sizes": ("weight", "linear", lambda: (normal(2, I), normal(O, I + 1), None)),
    "linear, dtypes": ("cast it first", "linear", lambda: (
        normal(2, I), normal(O, I).half(), None)),
    "linear, bias": ("bias", "linear", lambda: (normal(2, I), normal(O, I), normal(O + 1))),
    "projections, biases": ("one bias or None for each", "projections", lambda: (
        normal(2, I), [normal(O, I)], [])),
    "projections, inner sizes": ("weight", "projections", lambda: (
        normal(2, I), [normal(O, I), normal(O, I + 1)], [None, None])),
    "gated_linear, weights": ("must be alike", "gated_linear", lambda: (
        normal(2, I), normal(O, I), normal(O + 1, I))),
    "token_nll, label V": ("a label must be", "token_nll", lambda: (
        normal(2, D), normal(V, D), torch.tensor([0, V]))),
    "token_nll, label -1": ("a label must be", "token_nll", lambda: (
        normal(2, D), normal(V, D), torch.tensor([0, -1]))),
    "token_nll, float labels": ("int64", "token_nll", lambda: (
        normal(2, D), normal(V, D), torch.zeros(2))),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_named(limit):
    message, name, make = LIMITS[limit]
    with pytest.raises(ValueError, match=message):
        ROLES[name](*make())


def test_more_loads_than_32_bits_count_are_a_value_error():
    x = torch.zeros(1).expand(2**31)
    with pytest.raises(ValueError, match="split the tensor"):
        dialect.line_of(x)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_the_loss_in_chunks_is_the_loss_at_once(monkeypatch, dtype, bound):
    hidden, weight = normal(300, D).to(dtype), normal(V, D).to(dtype)
    labels = torch.arange(300) % V
    labels[::7] = -100
    at_once = run(ROLES["token_nll"], (hidden, weight, labels))
    monkeypatch.setattr(token_nll_chunks, "MOST_BYTES", 1)
    in_chunks = run(ROLES["token_nll"], (hidden, weight, labels))
    for got, want in zip(in_chunks, at_once, strict=True):
        assert error(got, want) <= bound


@pytest.mark.parametrize("label", [V, -1, -101, 10**9, 2**40, -(2**63)])
@pytest.mark.parametrize("needed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_wrong_label_in_a_late_chunk_is_named(monkeypatch, label, needed):
    monkeypatch.setattr(token_nll_chunks, "MOST_BYTES", 1)
    labels = torch.arange(300) % V
    labels[299] = label
    inputs = (
        x.requires_grad_(wanted)
        for x, wanted in zip((normal(300, D), normal(V, D)), needed, strict=True)
    )
    with pytest.raises(ValueError, match=f"got {label};"):
        ROLES["token_nll"](*inputs, labels)


@pytest.mark.parametrize(("width", "limit"), [(896, 400), (1536, 401), (3584, 640)])
@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 16_384, 32_768, 2**20])
def test_the_loss_has_few_chunks_and_each_takes_little_memory(num_rows, width, limit):
    bytes_of_a_row = 2 * 152_064
    size = token_nll_chunks._rows_of_a_chunk(num_rows, bytes_of_a_row, 2 * 151_936 * width)
    assert size % 128 == 0 and -(-num_rows // size) <= 26
    assert size * bytes_of_a_row <= limit * 2**20 or num_rows == 2**20


def test_without_gradients_the_loss_keeps_no_logits():
    hidden, weight, labels = normal(5, D), normal(V, D), torch.tensor([1, 2, -100, 10, 0])
    with torch.no_grad():
        nll_sum, num_tokens = ROLES["token_nll"](hidden.requires_grad_(), weight, labels)
    want, count = loss.token_nll(hidden, weight, labels)
    assert num_tokens == count and torch.allclose(nll_sum, want)
    assert not nll_sum.requires_grad


def test_all_labels_ignored_is_zero_with_zero_gradients():
    inputs = (normal(5, D), normal(V, D), torch.full((5,), -100))
    assert all(not x.any() for x in run(ROLES["token_nll"], inputs))


def test_a_misaligned_view_is_read_where_it_is():
    storage = torch.cat((torch.full((1,), torch.nan), normal(35)))
    gate = storage[1:].view(5, 7)
    assert torch.equal(ROLES["swiglu"](gate, gate), ROLES["swiglu"](gate.clone(), gate.clone()))


def test_a_product_over_a_long_inner_size_stays_exact_to_float32():
    a, b = normal(4, 4096), normal(4096, 8)
    got = matrix.product(a, b, (False, False), (False, True, True))
    assert error(got.double(), a.double() @ b.double()) <= 5e-7


def test_each_launch_is_counted():
    before = ROLES["swiglu"].kernel_calls()
    run(ROLES["swiglu"], (normal(5, 7), normal(5, 7)))
    assert ROLES["swiglu"].kernel_calls() == {name: n + 1 for name, n in before.items()}
