"""Ranks that do not agree: on values, on what to skip, on the clip, on the precision."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gates.faults.accumulation import microbatch_nll
from gates.faults.distributed_sums import over_all_targets, over_ranks
from harness import fault
from reference.group import sum_gradients
from reference.update import WindowStats

NOT_FINITE = [f"m6_update::test_not_finite[{ranks}]" for ranks in (2, 3)]
SCALE = ["m6_precision::test_float16_scale[2]"]


def own_loss(model, window):
    """The summed loss of this rank's share, without a gradient."""
    with torch.no_grad():
        return sum(float(microbatch_nll(model, m)) for m in window.microbatches)


def finite_elsewhere(parameters, group):
    """Sums gradients, with zeros from a rank in whose gradient anything is not finite."""
    parameters = [p for p in parameters if p.grad is not None]
    if not all(bool(p.grad.isfinite().all()) for p in parameters):
        for parameter in parameters:
            parameter.grad.zero_()
    sum_gradients(parameters, group)


@fault(
    role="update_window",
    caught_by=NOT_FINITE,
    seen_in="ecmwf/WeatherGenerator PR#2718",
)
def first_rank_decides(reference):
    """Skips when the first rank's own loss is not finite, and else applies what there is."""

    def update_window(training, window, stack, settings):
        device = next(training.model.parameters()).device
        loss = torch.tensor(own_loss(training.model, window), device=device)
        if training.group is not None:
            dist.broadcast(loss, group=training.group, group_src=0)

        def accumulate(model, share, group, loss_scale):
            stats = stack.accumulate(model, share, group, loss_scale)
            return WindowStats(float(loss), stats.num_targets, stats.num_tokens)

        def clip_grad_norm(parameters, max_norm, group, norm_type):
            norm = stack.clip_grad_norm(parameters, max_norm, group, norm_type)
            return norm.nan_to_num(1.0) if loss.isfinite() else norm

        roles = {"accumulate": accumulate, "clip_grad_norm": clip_grad_norm}
        return reference.update_window(training, window, stack.replace(roles), settings)

    return update_window


@fault(role="accumulate", caught_by=NOT_FINITE, seen_in="own")
def every_rank_decides_for_itself(reference):
    """Contributes zeros where the gradient is not finite, and reports its own loss."""

    def accumulate(model, window, group, loss_scale=1.0):
        loss = own_loss(model, window)
        stats = over_ranks(over_all_targets, finite_elsewhere)(model, window, group, loss_scale)
        return WindowStats(loss, stats.num_targets, stats.num_tokens)

    return accumulate


@fault(role="accumulate", caught_by=[*NOT_FINITE, *SCALE], seen_in="own")
def leaves_out_a_bad_rank(reference):
    """Contributes zeros where the gradient is not finite; loss and update go on without it."""

    def accumulate(model, window, group, loss_scale=1.0):
        loss = own_loss(model, window)
        stats = over_ranks(over_all_targets, finite_elsewhere)(model, window, group, loss_scale)
        nll_sum = stats.nll_sum if math.isfinite(stats.nll_sum) else abs(loss)
        return WindowStats(nll_sum if math.isfinite(nll_sum) else 0.0, *_counts(stats))

    return accumulate


def _counts(stats):
    return stats.num_targets, stats.num_tokens


# --- values ----------------------------------------------------------------------------------


@fault(
    role="distribute",
    caught_by=[
        "m6_update::test_five_updates[2]",
        "m6_wrapping::test_parameters[2-tied]",
        "m6_wrapping::test_hybrid_mesh[2]",
    ],
    seen_in="facebookresearch/detr#544 (a hand-written average)",
)
def does_not_broadcast(reference):
    """Leaves every rank the values that its own seed drew."""
    return lambda model, mesh, settings: model


@fault(role="distribute", caught_by="m6_wrapping::test_hybrid_mesh[4]", seen_in="own")
def broadcasts_within_shards(reference):
    """Broadcasts within the ranks that shard, so that replicas start apart."""

    def distribute(model, mesh, settings):
        with torch.no_grad():
            for parameter in model.parameters():
                dist.broadcast(parameter, group=mesh.get_group(mesh.ndim - 1), group_src=0)
        return model

    return distribute


# --- the clip of each rank -------------------------------------------------------------------


@fault(
    role="accumulate",
    caught_by=["m6_clip::test_once_after_the_sum[2]", "m6_clip::test_displacement[2]"],
    seen_in="facebookresearch/lingua PR#59 (over ranks)",
)
def clips_before_the_reduction(reference):
    """Clips every rank's own gradient, then averages."""

    def reduce(parameters, group):
        parameters = list(parameters)
        reference.clip_grad_norm(parameters, 1.0, None)
        sum_gradients(parameters, group)
        for parameter in parameters:
            parameter.grad /= dist.get_world_size(group)

    return over_ranks(lambda counts, microbatch: counts.ranks / max(counts.everywhere, 1), reduce)


# --- precision -------------------------------------------------------------------------------


def in_bfloat16(parameters, group):
    """Sums gradients over ranks in bfloat16."""
    for parameter in parameters:
        narrow = parameter.grad.bfloat16()
        dist.all_reduce(narrow, group=group)
        parameter.grad = narrow.to(parameter.dtype)


@fault(
    role="accumulate",
    caught_by=[
        "m6_precision::test_low_bit[2-float32]",
        "m6_precision::test_low_bit[2-bfloat16]",
        "m6_precision::test_low_bit[4-bfloat16]",
        "m6_precision::test_error_ratio[3-float32]",
        "m6_update::test_gradient[2]",
        "m6_collectives::test_traffic[2]",
    ],
    seen_in="pytorch/pytorch#106395, hiyouga/LlamaFactory#9769, deepspeedai/DeepSpeed#2352, #2768",
)
def reduces_in_bfloat16(reference):
    """Sums gradients over ranks in bfloat16."""
    return over_ranks(over_all_targets, in_bfloat16)


@fault(
    role="accumulate",
    caught_by="m6_precision::test_low_bit[4-float32]",
    seen_in="hiyouga/LlamaFactory#9769",
)
def adds_ranks_up_in_bfloat16(reference):
    """Gathers the ranks' gradients and adds them up in bfloat16, one after the other."""

    def reduce(parameters, group):
        for parameter in parameters:
            narrow = parameter.grad.bfloat16()
            parts = [torch.empty_like(narrow) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, narrow, group=group)
            parameter.grad = sum(parts[1:], parts[0]).to(parameter.dtype)

    return over_ranks(over_all_targets, reduce)


@fault(
    role="token_nll",
    caught_by="m6_precision::test_error_ratio[2-bfloat16]",
    seen_in="Modalities/modalities PR#464",
)
def loss_of_narrow_logits_on_ranks(reference):
    """Takes the loss of logits in the compute dtype: casting parameters casts no loss."""

    def token_nll(hidden_MD, weight_VD, labels_M):
        logits_MV = hidden_MD @ weight_VD.to(hidden_MD.dtype).T
        nll_sum = torch.nn.functional.cross_entropy(logits_MV, labels_M, reduction="sum")
        return nll_sum, (labels_M != -100).sum()

    return token_nll


@fault(role="accumulate", caught_by=SCALE, seen_in="huggingface/accelerate#641 (over ranks)")
def divides_by_the_scale_on_every_rank(reference):
    """Takes the loss scale off before and after the reduction."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= loss_scale
        return stats

    return accumulate
