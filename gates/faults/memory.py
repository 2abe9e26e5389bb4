"""Wrong and right ways to count bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

import torch

from harness import benign, fault
from reference.config import DecoderConfig
from reference.ledger.memory import GB, TrainingMemory

SHARES = "m0_memory::test_any_shares"


def remembered_with(change):
    """A training_memory in which `change(memory, stage, ranks)` replaces parts."""

    def build(reference):
        def training_memory(num_parameters, layout, zero_stage, num_ranks):
            memory = reference.training_memory(num_parameters, layout, zero_stage, num_ranks)
            whole = reference.training_memory(num_parameters, layout, 0, 1)
            shared = reference.training_memory(num_parameters, layout, 3, num_ranks)
            return replace(memory, **change(zero_stage, memory, whole, shared))

        return training_memory

    return build


@fault(
    role="training_memory",
    caught_by=["m0_memory::test_published", "m0_memory::test_measured[mixed]"],
    seen_in="deepspeedai/DeepSpeed#3442",
)
def twenty_bytes_a_parameter(reference):
    """Charges a float32 gradient beside the bfloat16 one: 20 bytes, not 16."""
    return remembered_with(lambda stage, m, whole, shared: {"gradients": 3 * m.gradients})(
        reference
    )


@fault(
    role="training_memory",
    caught_by=[
        "m0_memory::test_published",
        "m0_memory::test_parts_of_seven_billion",
        "m0_memory::test_measured",
        SHARES,
    ],
    seen_in="deepspeedai/DeepSpeed#3442",
)
def gradients_omitted(reference):
    """Forgets that gradients are stored."""
    return remembered_with(lambda stage, m, whole, shared: {"gradients": 0})(reference)


@fault(
    role="training_memory",
    caught_by=["m0_memory::test_zero_stages[2-4.304]", SHARES],
    seen_in="deepspeedai/DeepSpeed PR#5099",
)
def stage_two_without_gradients(reference):
    """Drops the gradients' share from the formula of ZeRO 2."""
    return remembered_with(
        lambda stage, m, whole, shared: {"gradients": m.gradients * (stage != 2)}
    )(reference)


@fault(
    role="training_memory",
    caught_by=["m0_memory::test_zero_stages[1-6.313]", SHARES],
    seen_in="own",
)
def stage_one_divides_the_gradients(reference):
    """Divides gradients at stage 1 and keeps the moments whole."""

    def change(stage, memory, whole, shared):
        if stage != 1:
            return {}
        return {
            "gradients": shared.gradients,
            "first_moments": whole.first_moments,
            "second_moments": whole.second_moments,
        }

    return remembered_with(change)(reference)


@fault(role="training_memory", caught_by=SHARES, seen_in="own")
def stage_two_divides_the_weights(reference):
    """Divides weights, not gradients, at stage 2: the same bytes while both take 2."""
    return remembered_with(
        lambda stage, m, whole, shared: (
            {"weights": shared.weights, "gradients": whole.gradients} if stage == 2 else {}
        )
    )(reference)


@dataclass(frozen=True)
class DecimalGib(TrainingMemory):
    """Calls 10^9 bytes a GiB."""

    @property
    def total_gib(self):
        return self.total / GB


@fault(role="training_memory", caught_by=["m0_memory::test_published", SHARES], seen_in="own")
def decimal_called_binary(reference):
    """Reports units of 10^9 bytes as GiB."""

    def training_memory(num_parameters, layout, zero_stage, num_ranks):
        memory = reference.training_memory(num_parameters, layout, zero_stage, num_ranks)
        return DecimalGib(**vars(memory))

    return training_memory


@fault(role="training_memory", caught_by=SHARES, seen_in="own")
def shares_rounded_down(reference):
    """Forgets the remainder of P / R, so the shares hold fewer parameters than the model."""

    def training_memory(num_parameters, layout, zero_stage, num_ranks):
        divisible = max(num_parameters // num_ranks, 1) * num_ranks
        return reference.training_memory(divisible, layout, zero_stage, num_ranks)

    return training_memory


KV_CACHE = ["m0_memory::test_kv_cache", "m0_memory::test_any_kv_cache"]


@fault(role="kv_cache_bytes", caught_by=KV_CACHE, seen_in="own")
def cache_of_every_query_head(reference):
    """Stores keys and values for N heads where K are shared."""

    def kv_cache_bytes(config, num_rows, context_tokens, bytes_per_element):
        if isinstance(config, DecoderConfig):
            config = replace(config, num_kv_heads=config.num_query_heads)
        return reference.kv_cache_bytes(config, num_rows, context_tokens, bytes_per_element)

    return kv_cache_bytes


@fault(role="kv_cache_bytes", caught_by=KV_CACHE, seen_in="own")
def cache_of_keys_only(reference):
    """Forgets the values: half of the cache."""
    return lambda config, rows, tokens, width: (
        reference.kv_cache_bytes(config, rows, tokens, width) // 2
    )


@benign(
    role="training_memory",
    accepted_by=["m0_memory::test_published", "m0_memory::test_zero_stages", SHARES],
    because="the fullest of the shares themselves, instead of a rounded quotient",
)
def the_fullest_of_all_shares(reference):
    """Cuts P into shares one by one and takes the largest."""

    def training_memory(num_parameters, layout, zero_stage, num_ranks):
        bounds = [num_parameters * rank // num_ranks for rank in range(num_ranks + 1)]
        share = max(high - low for low, high in itertools.pairwise(bounds))
        kept = [share if zero_stage >= first else num_parameters for first in (3, 2, 1, 1, 1)]
        widths = [getattr(layout, field.name) for field in fields(layout)]
        return TrainingMemory(*(count * width for count, width in zip(kept, widths, strict=True)))

    return training_memory


@benign(
    role="kv_cache_bytes",
    accepted_by=KV_CACHE,
    because="the bytes of tensors of that shape, which take no memory on the meta device",
)
def cache_tensors_on_meta(reference):
    """Asks tensors of the cache's shape for their bytes."""

    def kv_cache_bytes(config, num_rows, context_tokens, bytes_per_element):
        decoder = isinstance(config, DecoderConfig)
        num_heads = config.num_kv_heads if decoder else config.num_heads
        shape = (2, config.num_layers, num_rows, context_tokens, num_heads, config.head_width)
        cache = torch.empty(shape, dtype=torch.int8, device="meta")
        return cache.nbytes * bytes_per_element

    return kv_cache_bytes
