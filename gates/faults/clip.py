"""Wrong and right ways to clip a gradient."""

from __future__ import annotations

import torch

from harness import benign, fault

GATE = "m2_clip::"
ABOVE = [f"{GATE}test_norm_and_factor[{norm}]" for norm in ("1.001", "5.3", "11000.0")]
BELOW = [f"{GATE}test_norm_and_factor[{norm}]" for norm in ("0.43", "0.999")]
EVERY_NORM = [f"{GATE}test_norm_and_factor", f"{GATE}test_against_reference"]


def with_gradients(parameters):
    return [parameter for parameter in parameters if parameter.grad is not None]


def clip_with(norm_of, factor_of):
    """A clip that scales every gradient by factor_of(norm, max_norm) and returns the norm."""

    def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
        chosen = with_gradients(parameters)
        norm = norm_of([parameter.grad for parameter in chosen])
        for parameter in chosen:
            parameter.grad *= factor_of(norm, max_norm)
        return norm

    return clip_grad_norm


def total_norm(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).norm()


def capped(norm, max_norm):
    return (max_norm / norm).clamp(max=1.0) if norm.isfinite() else 1.0


@fault(role="clip_grad_norm", caught_by=[*ABOVE, f"{GATE}test_against_reference"], seen_in="own")
def clips_each_parameter(reference):
    """Clips every parameter's gradient on its own: the direction changes."""

    def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
        norm = total_norm([p.grad for p in with_gradients(parameters)])
        for parameter in with_gradients(parameters):
            reference.clip_grad_norm([parameter], max_norm, group, norm_type)
        return norm

    return clip_grad_norm


@fault(role="clip_grad_norm", caught_by=[*ABOVE, f"{GATE}test_against_reference"], seen_in="own")
def clips_values(reference):
    """Clamps every element to the limit instead of scaling the whole."""

    def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
        norm = total_norm([p.grad for p in with_gradients(parameters)])
        for parameter in with_gradients(parameters):
            parameter.grad.clamp_(-max_norm, max_norm)
        return norm

    return clip_grad_norm


@fault(role="clip_grad_norm", caught_by=[*ABOVE, f"{GATE}test_against_reference"], seen_in="own")
def returns_the_norm_after(reference):
    """Returns the norm after clipping: a run that explodes is logged as 1."""

    def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
        chosen = with_gradients(parameters)
        reference.clip_grad_norm(chosen, max_norm, group, norm_type)
        return total_norm([parameter.grad for parameter in chosen])

    return clip_grad_norm


@fault(role="clip_grad_norm", caught_by=[*BELOW, f"{GATE}test_against_reference"], seen_in="own")
def normalises(reference):
    """Scales small gradients up to the limit too."""
    return clip_with(total_norm, lambda norm, max_norm: max_norm / norm)


@fault(role="clip_grad_norm", caught_by=EVERY_NORM, seen_in="own")
def forgets_the_root(reference):
    """Compares the squared norm with the limit."""
    return clip_with(lambda gradients: total_norm(gradients) ** 2, capped)


@fault(role="clip_grad_norm", caught_by=EVERY_NORM, seen_in="own")
def largest_norm_of_a_parameter(reference):
    """Takes the largest norm of a parameter for the norm of the whole."""
    return clip_with(lambda gradients: torch.stack([g.norm() for g in gradients]).max(), capped)


@fault(
    role="clip_grad_norm",
    caught_by=[*EVERY_NORM, f"{GATE}test_tied_norm"],
    seen_in="mindspore-ai/hyper-parallel#279",
)
def leaves_vectors_out(reference):
    """Leaves norm gains and biases out of the norm, and clips them with the rest."""
    return clip_with(lambda gradients: total_norm([g for g in gradients if g.dim() > 1]), capped)


@fault(role="clip_grad_norm", caught_by=EVERY_NORM, seen_in="own")
def bfloat16_norm(reference):
    """Sums the squares in bfloat16."""
    return clip_with(
        lambda gradients: total_norm([g.bfloat16() for g in gradients]).float(), capped
    )


@fault(role="clip_grad_norm", caught_by=f"{GATE}test_not_finite", seen_in="own")
def factor_that_is_not_finite(reference):
    """Scales by max_norm / norm whatever it is: one inf sets every other gradient to 0."""
    return clip_with(total_norm, lambda norm, max_norm: (max_norm / norm).clamp(max=1.0))


@fault(role="clip_grad_norm", caught_by=f"{GATE}test_not_finite", seen_in="own")
def papers_over(reference):
    """Replaces what is not finite by 0 and goes on as if nothing had been."""

    def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
        chosen = with_gradients(parameters)
        for parameter in chosen:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return reference.clip_grad_norm(chosen, max_norm, group, norm_type)

    return clip_grad_norm


ACCEPTED = [
    *(f"{GATE}test_{name}" for name in (
        "norm_and_factor", "once_after_accumulation", "displacement", "tied_norm",
        "against_reference",
    )),
    "m2_windows::test_skipped_window",
]  # fmt: skip


@benign(
    role="clip_grad_norm",
    accepted_by=ACCEPTED,  # not test_not_finite: it scales by what is not finite
    because="1e-6 added to the norm is below the bound; the norm tells the caller to skip",
)
def torch_clip(reference):
    """torch.nn.utils.clip_grad_norm_, which adds 1e-6 to the norm."""
    return lambda parameters, max_norm, group, norm_type=2.0: torch.nn.utils.clip_grad_norm_(
        parameters, max_norm, norm_type
    )


@benign(
    role="clip_grad_norm",
    accepted_by=[*ACCEPTED, f"{GATE}test_not_finite"],
    because="one norm over a concatenated vector is the same sum in another order",
)
def loop_clip(reference):
    """The norm of one long vector, and a loop instead of foreach."""
    return clip_with(total_norm, capped)
