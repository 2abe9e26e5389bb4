"""The operators against the formulas written out by hand, in float64, and torch's gradcheck."""

import math

import pytest
import torch
import torch.nn.functional as F

from reference.ops import add_rms_norm, attention, linear, projections, rms_norm, rope, swiglu

FLOAT64 = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def explicit_attention(q_BTNH, k_BTKH, v_BTKH, documents_BT):
    """One weight at a time, as a sum over the visible keys."""
    B, T, N, H = q_BTNH.shape
    group = N // k_BTKH.shape[2]
    o_BTNH = torch.zeros_like(q_BTNH)
    for b in range(B):
        for t in range(T):
            document = torch.zeros(T) if documents_BT is None else documents_BT[b]
            seen = [s for s in range(t + 1) if document[s] == document[t]]
            for n in range(N):
                scores = [q_BTNH[b, t, n] @ k_BTKH[b, s, n // group] / math.sqrt(H) for s in seen]
                weights = torch.stack(scores).softmax(0)
                o_BTNH[b, t, n] = sum(
                    w * v_BTKH[b, s, n // group] for w, s in zip(weights, seen, strict=True)
                )
    return o_BTNH


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_attention_is_the_sum_over_visible_keys(num_kv_heads, packed, scale):
    q_BTNH = torch.randn(2, 9, 8, 4, **FLOAT64) * scale
    k_BTKH, v_BTKH = torch.randn(2, 2, 9, num_kv_heads, 4, **FLOAT64)
    documents_BT = torch.tensor([[5] * 3 + [2] * 6, [9] + [0] * 7 + [9]]) if packed else None
    got = attention(q_BTNH, k_BTKH, v_BTKH, documents_BT)
    torch.testing.assert_close(got, explicit_attention(q_BTNH, k_BTKH, v_BTKH, documents_BT))


def test_attention_has_the_gradient_of_its_values():
    q_BTNH = torch.randn(1, 5, 4, 2, **FLOAT64, requires_grad=True)
    k_BTKH, v_BTKH = torch.randn(2, 1, 5, 2, 2, **FLOAT64).unbind()
    documents_BT = torch.tensor([[0, 0, 0, 1, 1]])
    inputs = (q_BTNH, k_BTKH.requires_grad_(), v_BTKH.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, documents_BT), inputs)


def test_attention_of_16_bits_rounds_once():
    q_BTNH, k_BTKH, v_BTKH = (torch.randn(2, 40, n, 16).bfloat16() for n in (4, 2, 2))
    got = attention(q_BTNH, k_BTKH, v_BTKH, None)
    want = attention(q_BTNH.double(), k_BTKH.double(), v_BTKH.double(), None)
    assert got.dtype == torch.bfloat16
    assert (got != want.bfloat16()).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("shapes", "documents"),
    [
        (((1, 4, 4, 2), (1, 4, 3, 2), (1, 4, 3, 2)), None),  # 3 does not divide 4
        (((1, 4, 4, 2), (1, 5, 2, 2), (1, 5, 2, 2)), None),  # another length
        (((1, 4, 4, 2), (1, 4, 2, 2), (1, 4, 4, 2)), None),
        (((1, 4, 4, 2), (1, 4, 2, 2), (1, 4, 2, 2)), (3, 1, 4)),
        (((1, 4, 4, 2), (1, 4, 2, 2), (1, 4, 2, 2)), (1, 5)),
    ],
)
def test_attention_refuses_shapes_that_do_not_fit(shapes, documents):
    documents_BT = None if documents is None else torch.zeros(documents, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be"):
        attention(*(torch.zeros(shape) for shape in shapes), documents_BT)


def test_rope_is_a_rotation_of_complex_numbers():
    q_BTNH, k_BTKH = torch.randn(2, 6, 4, 8, **FLOAT64), torch.randn(2, 6, 2, 8, **FLOAT64)
    positions_BT = torch.randint(0, 20_000, (2, 6))
    frequency_h = 500.0 ** -(torch.arange(4, **FLOAT64) / 4)
    turn_BT1h = torch.polar(torch.ones(1, **FLOAT64), positions_BT[..., None, None] * frequency_h)
    for x, y in zip((q_BTNH, k_BTKH), rope(q_BTNH, k_BTKH, positions_BT, 500.0), strict=True):
        z = torch.complex(x[..., :4], x[..., 4:]) * turn_BT1h
        torch.testing.assert_close(y, torch.cat((z.real, z.imag), -1))


def test_rope_leaves_position_0_alone_and_has_the_gradient_of_its_values():
    q_BTNH = torch.randn(1, 3, 2, 4, **FLOAT64, requires_grad=True)
    k_BTKH = torch.randn(1, 3, 1, 4, **FLOAT64, requires_grad=True)
    q, k = rope(q_BTNH, k_BTKH, torch.zeros(1, 3, dtype=torch.int64), 1e4)
    assert torch.equal(q, q_BTNH)
    assert torch.equal(k, k_BTKH)
    positions_BT = torch.tensor([[0, 7, 300]])
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, positions_BT, 1e4), (q_BTNH, k_BTKH))


@pytest.mark.parametrize(
    ("positions", "head_width"),
    [
        (torch.zeros(3, 2, 4, dtype=torch.int64), 8),
        (torch.zeros(4, dtype=torch.int64), 8),
        (torch.zeros(2, 4), 8),
        (torch.zeros(2, 4, dtype=torch.int64), 7),
    ],
)
def test_rope_refuses_other_positions_and_odd_heads(positions, head_width):
    with pytest.raises(ValueError, match=r"positions must be integers|must be even"):
        rope(torch.zeros(2, 4, 2, head_width), torch.zeros(2, 4, 1, head_width), positions, 1e4)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rms_norm_has_epsilon_inside_the_root(scale):
    x, weight = torch.randn(5, 7, **FLOAT64) * scale, torch.randn(7, **FLOAT64)
    mean_square = (x * x).sum(-1, keepdim=True) / 7
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), x / (mean_square + 1e-6).sqrt() * weight)


def test_rms_norm_of_a_zero_row_has_a_finite_gradient():
    x = torch.zeros(1, 4, **FLOAT64, requires_grad=True)
    rms_norm(x, torch.ones(4, **FLOAT64), 1e-6).backward(torch.ones(1, 4, **FLOAT64))
    torch.testing.assert_close(x.grad, torch.full((1, 4), 1e3, **FLOAT64))


def test_rms_norm_has_the_gradient_of_its_values():
    x = torch.randn(3, 5, **FLOAT64, requires_grad=True)
    weight = torch.randn(5, **FLOAT64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, weight))


def test_rms_norm_agrees_with_torch():
    x, weight = torch.randn(3, 5), torch.randn(5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (5,), weight, 1e-6))


def test_rms_norm_rounds_once_and_keeps_a_wider_gain():
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128) * 3
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    want = rms_norm(x.double(), weight.double(), 1e-6).bfloat16()
    assert (got != want).double().mean() < 1e-3


def test_rms_norm_refuses_a_gain_of_another_width():
    with pytest.raises(ValueError, match=r"weight must be \[4\]"):
        rms_norm(torch.zeros(2, 4), torch.zeros(1), 1e-6)


def test_swiglu_is_silu_of_the_gate_times_up():
    gate, up = torch.randn(2, 3, 5, **FLOAT64).unbind()
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + (-gate).exp()) * up)
    inputs = (gate.requires_grad_(), up.requires_grad_())
    assert torch.autograd.gradcheck(swiglu, inputs)


def test_linear_multiplies_by_the_transposed_weight():
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(linear(x, weight, None), x @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_add_rms_norm_normalises_the_rounded_total(dtype):
    x, residual, weight = (torch.randn(n, dtype=dtype) for n in ((5, 8), (5, 8), (8,)))
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, 1e-6))


def test_add_rms_norm_adds_the_gradients_of_both_outputs():
    x, residual = (torch.randn(3, 8, **FLOAT64, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, **FLOAT64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: add_rms_norm(*a, 1e-6), (x, residual, weight))


@pytest.mark.parametrize("other", [torch.zeros(2, 8), torch.zeros(3, 8).double()])
def test_add_rms_norm_refuses_streams_that_differ(other):
    with pytest.raises(ValueError, match="x and residual must be alike"):
        add_rms_norm(torch.zeros(3, 8), other, torch.ones(8), 1e-6)


@pytest.mark.parametrize("biases", [(None,), (None, None, None)])
def test_projections_refuse_another_number_of_biases_than_of_weights(biases):
    with pytest.raises(ValueError, match=r"2 weights and [13] biases"):
        projections(torch.zeros(3, 8), (torch.zeros(4, 8), torch.zeros(2, 8)), biases)
