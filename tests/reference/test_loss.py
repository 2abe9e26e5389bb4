"""The loss is a sum and a count; no target is no loss; a wrong label is refused."""

import math

import pytest
import torch

from reference.loss import NO_TARGET, token_nll


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_it_is_the_sum_over_the_targets():
    hidden_MD, weight_VD = (torch.randn(n, 3, dtype=torch.float64) for n in (4, 5))
    labels_M = torch.tensor([2, NO_TARGET, 0, 4])
    probability_MV = (hidden_MD @ weight_VD.T).softmax(-1)
    want = -sum(math.log(probability_MV[m, labels_M[m]]) for m in (0, 2, 3))
    nll_sum, num_tokens = token_nll(hidden_MD, weight_VD, labels_M)
    assert nll_sum.item() == pytest.approx(want, rel=1e-13)
    assert (num_tokens.item(), num_tokens.dtype, num_tokens.shape) == (3, torch.int64, ())


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_sum_is_float32_or_wider(dtype, wide):
    nll_sum, _ = token_nll(torch.ones(2, 3, dtype=dtype), torch.ones(5, 3), torch.tensor([0, 1]))
    assert nll_sum.dtype == wide
    assert nll_sum.item() == pytest.approx(2 * math.log(5))


def test_logits_of_16_bits_are_not_rounded():
    hidden_MD, weight_VD = torch.randn(8, 16).bfloat16(), torch.randn(50, 16)
    labels_M = torch.randint(50, (8,))
    got, _ = token_nll(hidden_MD, weight_VD, labels_M)
    want, _ = token_nll(hidden_MD.double(), weight_VD.bfloat16().double(), labels_M)
    assert got.item() == pytest.approx(want.item(), rel=1e-6)


def test_without_a_target_the_sum_is_zero_and_so_is_the_gradient():
    hidden_MD = torch.randn(4, 3, requires_grad=True)
    weight_VD = torch.randn(5, 3, requires_grad=True)
    nll_sum, num_tokens = token_nll(hidden_MD, weight_VD, torch.full((4,), NO_TARGET))
    nll_sum.backward()
    assert (nll_sum.item(), num_tokens.item()) == (0.0, 0)
    assert not hidden_MD.grad.any()
    assert not weight_VD.grad.any()


def test_of_no_token_at_all_too():
    nll_sum, num_tokens = token_nll(torch.zeros(0, 3), torch.zeros(5, 3), torch.zeros(0).long())
    assert (nll_sum.item(), num_tokens.item()) == (0.0, 0)


def test_it_has_the_gradient_of_its_values():
    hidden_MD = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    labels_M = torch.tensor([1, NO_TARGET, 3])
    assert torch.autograd.gradcheck(
        lambda h, w: token_nll(h, w, labels_M)[0], (hidden_MD, weight_VD)
    )


@pytest.mark.parametrize("label", [5, -1, -101, 2**40])
def test_a_label_outside_the_vocabulary_is_refused(label):
    with pytest.raises(ValueError, match=f"got {label}; check the tokenizer"):
        token_nll(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, label]))


@pytest.mark.parametrize(
    ("hidden", "weight", "labels"),
    [
        ((2, 3, 4), (5, 4), (2, 3)),
        ((2, 3), (5, 3), (3,)),
        ((2, 3), (5, 4), (2,)),
        ((2, 3), (3,), (2,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(hidden, weight, labels):
    with pytest.raises(ValueError, match="must be"):
        token_nll(torch.zeros(hidden), torch.zeros(weight), torch.zeros(labels).long())


def test_a_long_vocabulary_costs_float32_no_digits():
    hidden_MD = torch.randn(33, 16)
    weight_VD = torch.randn(150_000, 16)
    labels_M = torch.randint(150_000, (33,))
    tensors = [hidden_MD.requires_grad_(), weight_VD.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    results = [token_nll(*x, labels_M)[0] for x in (tensors, exact)]
    assert results[0].item() == pytest.approx(results[1].item(), rel=3e-7)
    gradients = (torch.autograd.grad(*x) for x in zip(results, (tensors, exact), strict=True))
    for got, want in zip(*gradients, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
def test_logits_far_from_zero_are_as_near_as_by_cross_entropy(offset):
    hidden_MD, weight_VD = torch.randn(131, 64), torch.randn(131, 64) / 4
    hidden_MD[:, 0], weight_VD[:, 0] = 1.0, offset
    labels_M = torch.randint(131, (131,))

    def by_cross_entropy(hidden_MD, weight_VD, labels_M):
        logits_MV = hidden_MD @ weight_VD.T
        return torch.nn.functional.cross_entropy(logits_MV, labels_M, reduction="sum"), None

    def gradient(function, dtype):
        hidden = hidden_MD.to(dtype).requires_grad_()
        nll_sum, _ = function(hidden, weight_VD.to(dtype), labels_M)
        return torch.autograd.grad(nll_sum, hidden)[0].double()

    exact = gradient(by_cross_entropy, torch.float64)
    ours, theirs = (
        (gradient(function, torch.float32) - exact).norm()
        for function in (token_nll, by_cross_entropy)
    )
    assert ours <= 2 * theirs
