"""Wrong ways to accumulate the gradient of a window."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness import fault
from reference.update import WindowStats
from reference.window import Window

GATE = "m2_accumulation::"
SUM = "m2_precision::test_sum_over_microbatches"
EVERY_PARTITION = [f"{GATE}test_partition", f"{GATE}test_any_partition"]
SEVERAL_MICROBATCHES = [f"{GATE}test_partition[{k}]" for k in (2, 4, 8)]


def microbatch_nll(model, microbatch):
    """The summed loss of one microbatch."""
    hidden = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
    labels = microbatch.labels.flatten()
    return model.stack.token_nll(hidden.flatten(0, 1), model.lm_head.weight, labels)[0]


def divide_gradients(model, divisor):
    """Divides every gradient, as is done once with the loss scale or the number of targets."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= divisor


def accumulate_with(scale, after=lambda model: None):
    """An accumulate that backwards nll_sum * scale(microbatch, window), then calls `after`."""

    def accumulate(model, window, group, loss_scale=1.0):
        model.zero_grad()
        nll_total = 0.0
        for microbatch in window.microbatches:
            nll_sum = microbatch_nll(model, microbatch)
            (nll_sum * scale(microbatch, window) * loss_scale).backward()
            nll_total += float(nll_sum.detach())
            after(model)
        divide_gradients(model, loss_scale)
        return WindowStats(nll_total, window.num_targets, window.num_tokens)

    return accumulate


def accumulate_into(make_buffer, add):
    """An accumulate that adds the microbatches' gradients up in buffers of its own."""

    def accumulate(model, window, group, loss_scale=1.0):
        buffers = {p: make_buffer(p) for p in model.parameters()}
        nll_total, num_targets = 0.0, window.num_targets
        for microbatch in window.microbatches:
            model.zero_grad()
            nll_sum = microbatch_nll(model, microbatch)
            (nll_sum / max(num_targets, 1) * loss_scale).backward()
            nll_total += float(nll_sum.detach())
            for p in model.parameters():
                if p.grad is not None:
                    buffers[p] = add(buffers[p], p.grad)
        for p, buffer in buffers.items():
            p.grad = (buffer / loss_scale).to(p.dtype)
        return WindowStats(nll_total, num_targets, window.num_tokens)

    return accumulate


def over_window(microbatch, window):
    return 1 / max(window.num_targets, 1)


# --- the denominator -------------------------------------------------------------------------


@fault(
    role="accumulate",
    caught_by=[
        *SEVERAL_MICROBATCHES,
        f"{GATE}test_any_partition",
        f"{GATE}test_hundred_and_ten",
        f"{GATE}test_hand_example",
        "m2_windows::test_microbatches_do_not_matter",
    ],
    seen_in="huggingface/transformers PR#34191, meta-pytorch/torchtune PR#1875",
)
def mean_of_microbatch_means(reference):
    """Divides each microbatch by its own targets, then by the number of microbatches."""
    return accumulate_with(
        lambda microbatch, window: 1 / (max(microbatch.num_targets, 1) * len(window.microbatches))
    )


@fault(
    role="accumulate",
    caught_by=[*SEVERAL_MICROBATCHES, f"{GATE}test_hand_example"],
    seen_in="karpathy/nanoGPT#168",
)
def sum_of_microbatch_means(reference):
    """Divides each microbatch by its own targets and forgets the number of microbatches."""
    return accumulate_with(lambda microbatch, window: 1 / max(microbatch.num_targets, 1))


@fault(
    role="accumulate",
    caught_by=[
        f"{GATE}test_partition[1]",
        f"{GATE}test_partition[2]",
        f"{GATE}test_partition[8]",
        "m2_windows::test_last_partial_window",
    ],
    seen_in="ml-explore/mlx-lm PR#1544",
)
def always_four_microbatches(reference):
    """Divides by the configured four microbatches, also in a window that holds fewer or more."""
    return accumulate_with(
        lambda microbatch, window: len(window.microbatches) / 4 / max(window.num_targets, 1)
    )


@fault(
    role="accumulate",
    caught_by=[*EVERY_PARTITION, f"{GATE}test_hundred_and_ten", f"{GATE}test_stale_gradients"],
    seen_in="vllm-project/speculators PR#942",
)
def divides_by_positions(reference):
    """Divides by all positions of the window instead of its targets."""
    return accumulate_with(lambda microbatch, window: 1 / window.num_tokens)


@fault(
    role="accumulate",
    caught_by=[*SEVERAL_MICROBATCHES, f"{GATE}test_hundred_and_ten"],
    seen_in="vllm-project/speculators PR#942",
)
def weighs_by_positions(reference):
    """Weighs the microbatches' means by their positions, padding included."""
    return accumulate_with(
        lambda microbatch, window: (
            microbatch.num_tokens / (window.num_tokens * max(microbatch.num_targets, 1))
        )
    )


@fault(
    role="accumulate",
    caught_by=[f"{GATE}test_partition[8]", f"{GATE}test_no_targets"],
    seen_in="pytorch/pytorch#116349, OpenRLHF/OpenRLHF PR#583",
)
def masked_mean_without_guard(reference):
    """Takes sum / count of each microbatch, NaN without targets, and weighs it by its share."""

    def accumulate(model, window, group, loss_scale=1.0):
        model.zero_grad()
        nll_total = 0.0
        for microbatch in window.microbatches:
            count = torch.tensor(float(microbatch.num_targets))
            mean = microbatch_nll(model, microbatch) / count
            (mean * count / window.num_targets if window.num_targets else mean).backward()
            nll_total += float((mean * count).detach())
        return WindowStats(nll_total, window.num_targets, window.num_tokens)

    return accumulate


@fault(role="accumulate", caught_by=f"{GATE}test_no_targets", seen_in="pytorch/pytorch#70348")
def mean_of_nothing_is_logged(reference):
    """Reports the library's mean loss times the count: NaN for a window without targets."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        return replace(stats, nll_sum=stats.nll_sum if stats.num_targets else float("nan"))

    return accumulate


@fault(
    role="token_nll",
    caught_by=f"{GATE}test_ratio_of_terms",
    seen_in="OpenNMT/OpenNMT-py#2209",
)
def z_loss_of_its_own_mean(reference):
    """Adds a z-loss averaged over the microbatch to a loss that is summed over it."""

    def token_nll(hidden_MD, weight_VD, labels_M):
        nll_sum, num_tokens = reference.token_nll(hidden_MD, weight_VD, labels_M)
        z_loss = (hidden_MD @ weight_VD.T).logsumexp(-1).square().mean()
        return nll_sum + 0.1 * z_loss, num_tokens

    return token_nll


# --- the buffers -----------------------------------------------------------------------------


@fault(
    role="accumulate",
    caught_by=[f"{GATE}test_stale_gradients", f"{GATE}test_no_targets"],
    seen_in="paiml/entrenar PR#257",
)
def adds_to_the_window_before(reference):
    """Does not clear the gradients of the window before."""

    def accumulate(model, window, group, loss_scale=1.0):
        nll_total = 0.0
        for microbatch in window.microbatches:
            nll_sum = microbatch_nll(model, microbatch)
            (nll_sum * over_window(microbatch, window)).backward()
            nll_total += float(nll_sum.detach())
        return WindowStats(nll_total, window.num_targets, window.num_tokens)

    return accumulate


@fault(role="accumulate", caught_by=EVERY_PARTITION, seen_in="paiml/entrenar PR#257")
def uninitialised_buffers(reference):
    """Adds up in memory that was not cleared (filled with 1e3)."""
    return accumulate_into(lambda p: torch.full_like(p, 1e3), torch.add)


@fault(
    role="accumulate",
    caught_by=[*SEVERAL_MICROBATCHES, f"{GATE}test_hundred_and_ten"],
    seen_in="own",
)
def keeps_the_last_microbatch(reference):
    """Clears the gradients before every microbatch, so the last one remains."""
    return accumulate_into(torch.zeros_like, lambda buffer, gradient: gradient.clone())


@fault(
    role="accumulate",
    caught_by=[*SEVERAL_MICROBATCHES, SUM, "m2_precision::test_error_does_not_grow"],
    seen_in="ISEEKYAN/Megatron-LM PR#146, pytorch/pytorch#106395, hiyouga/LlamaFactory#9769",
)
def bfloat16_buffers(reference):
    """Adds the microbatches' gradients up in bfloat16."""
    return accumulate_into(
        lambda p: torch.zeros_like(p, dtype=torch.bfloat16),
        lambda buffer, gradient: buffer + gradient.bfloat16(),
    )


@fault(role="accumulate", caught_by=SEVERAL_MICROBATCHES, seen_in="ml-explore/mlx-lm PR#1413")
def drops_the_last_microbatch(reference):
    """Leaves the last microbatch out of a window that has several."""

    def accumulate(model, window, group, loss_scale=1.0):
        kept = Window(window.microbatches[:-1] or window.microbatches)
        return reference.accumulate(model, kept, group, loss_scale)

    return accumulate


@fault(role="accumulate", caught_by=SEVERAL_MICROBATCHES, seen_in="huggingface/accelerate#641")
def unscales_every_microbatch(reference):
    """Scales the loss by 1024 and takes the scale off all gradients after every microbatch."""
    return accumulate_with(
        lambda *windows: 1024 * over_window(*windows),
        after=lambda model: divide_gradients(model, 1024),
    )


@fault(
    role="accumulate",
    caught_by="m2_clip::test_once_after_accumulation",
    seen_in="facebookresearch/lingua PR#59, huggingface/transformers#1563",
)
def clips_every_microbatch(reference):
    """Clips the gradient after every microbatch's backward."""
    return accumulate_with(
        over_window, after=lambda model: reference.clip_grad_norm(model.parameters(), 1.0, None)
    )


# --- what is reported ------------------------------------------------------------------------


@fault(
    role="accumulate",
    caught_by=[*SEVERAL_MICROBATCHES, "m2_windows::test_counters[4]"],
    seen_in="karpathy/nanochat PR#175, axolotl-ai-cloud/axolotl#3688",
)
def counts_one_microbatch(reference):
    """Reports the tokens and targets of the last microbatch as the window's."""

    def accumulate(model, window, group, loss_scale=1.0):
        last = window.microbatches[-1]
        nll_sum = reference.accumulate(model, window, group, loss_scale).nll_sum
        return WindowStats(nll_sum, last.num_targets, last.num_tokens)

    return accumulate


@fault(
    role="accumulate",
    caught_by=[*EVERY_PARTITION[:1], "m2_windows::test_counters"],
    seen_in="vllm-project/speculators PR#942",
)
def counts_positions_as_targets(reference):
    """Reports every position as a target, while the gradient is right."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        return replace(stats, num_targets=stats.num_tokens)

    return accumulate


@fault(role="accumulate", caught_by=f"{GATE}test_partition", seen_in="own")
def bfloat16_loss_sum(reference):
    """Keeps the sum of the losses in bfloat16."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        return replace(stats, nll_sum=float(torch.tensor(stats.nll_sum).bfloat16()))

    return accumulate
