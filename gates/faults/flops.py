"""Wrong and right ways to count FLOPs."""

from __future__ import annotations

from dataclasses import replace

from harness import benign, fault
from reference.config import DecoderConfig
from reference.ledger.flops import TrainingFlops

ANY_TRACED = "m0_flops::test_any_traced"
ANY_SUM = "m0_flops::test_any_sum"
LAYERS_AGAIN = "m0_flops::test_recomputed_layers"


def traced(*cases):
    return [f"m0_flops::test_traced[{case}]" for case in cases]


EVERY_TRACE = [*traced("tied-MHA", "untied-MHA", "tied-GQA", "untied-GQA"), ANY_TRACED]


def charged_with(change):
    """A training_flops in which `change(config, flops, parameters)` replaces parts."""

    def build(reference):
        def training_flops(config, num_tokens, context_tokens, convention):
            flops = reference.training_flops(config, num_tokens, context_tokens, convention)
            return replace(flops, **change(config, flops, reference.parameter_count(config)))

        return training_flops

    return build


@fault(
    role="training_flops",
    caught_by=[*traced("untied-MHA", "untied-GQA"), ANY_TRACED, ANY_SUM],
    seen_in="pytorch/torchtitan PR#280",
)
def lookup_charged_as_a_product(reference):
    """Charges 2 V D for looking a token up in an untied embedding."""

    def change(config, flops, parameters):
        untied = flops.convention.weights == "products" and parameters.head > 0
        return {"weights_per_token": flops.weights_per_token + 2 * parameters.embedding * untied}

    return charged_with(change)(reference)


@fault(
    role="training_flops",
    caught_by=["m0_flops::test_plan[6]", "m0_flops::test_attention_factor[6]"],
    seen_in="pytorch/torchtitan PR#280",
)
def full_scores_under_the_causal_label(reference):
    """Charges 12 L T N H where the convention says 6."""
    return charged_with(
        lambda config, flops, parameters: {
            "attention_per_token": flops.attention_per_token
            * (2 if flops.convention.kappa == 6 else 1)
        }
    )(reference)


@fault(
    role="training_flops",
    caught_by=["m0_flops::test_plan[12]", *EVERY_TRACE],
    seen_in="pytorch/torchtitan PR#280",
)
def causal_half_under_the_full_label(reference):
    """Charges 6 L T N H where the convention says 12."""
    return charged_with(
        lambda config, flops, parameters: {
            "attention_per_token": flops.attention_per_token
            // (2 if flops.convention.kappa == 12 else 1)
        }
    )(reference)


@fault(
    role="training_flops",
    caught_by=["m0_flops::test_recomputed_scores", "m0_flops::test_plan[6]", *EVERY_TRACE],
    seen_in="pytorch/torchtitan PR#280",
)
def kernel_recomputation_in_the_model(reference):
    """Charges the model 7 L T N H, a fused kernel's own recomputation among it."""
    return charged_with(
        lambda config, flops, parameters: {
            "attention_per_token": flops.attention_per_token * 7 // 6
        }
    )(reference)


@fault(role="training_flops", caught_by=EVERY_TRACE, seen_in="allenai/OLMo-core PR#478")
def attention_over_the_model_width(reference):
    """Takes D for the query width N H, though the head width is configured."""
    return charged_with(
        lambda config, flops, parameters: {
            "attention_per_token": flops.convention.kappa
            * config.num_layers
            * flops.context_tokens
            * config.model_width
        }
    )(reference)


@fault(
    role="training_flops",
    caught_by=[*EVERY_TRACE, "m0_flops::test_traced_presets[plan-1.15b]"],
    seen_in="allenai/OLMo-core PR#478",
)
def one_up_projection_multiplied(reference):
    """Multiplies two matrices of SwiGLU, where there are three."""

    def change(config, flops, parameters):
        saved = 2 * parameters.feed_forward if isinstance(config, DecoderConfig) else 0
        return {"weights_per_token": flops.weights_per_token - saved}

    return charged_with(change)(reference)


@fault(
    role="training_flops",
    caught_by=[*traced("tied-GQA", "untied-GQA", "tied-MQA", "untied-MQA"), ANY_TRACED],
    seen_in="verl-project/verl PR#6389",
)
def groups_ignored(reference):
    """Charges keys and values of every query head."""

    def training_flops(config, num_tokens, context_tokens, convention):
        if isinstance(config, DecoderConfig):
            config = replace(config, num_kv_heads=config.num_query_heads)
        return reference.training_flops(config, num_tokens, context_tokens, convention)

    return training_flops


@fault(
    role="training_flops",
    caught_by=["m0_flops::test_seven_billion", "m0_flops::test_plan", *EVERY_TRACE],
    seen_in="own",
)
def backward_as_costly_as_forward(reference):
    """Charges two products a weight: the gradient of the input or of the weight is forgotten."""
    return charged_with(
        lambda config, flops, parameters: {"weights_per_token": flops.weights_per_token * 2 // 3}
    )(reference)


@fault(role="training_flops", caught_by=EVERY_TRACE, seen_in="own")
def attention_across_rows(reference):
    """Lets a token attend to all tokens of the batch, not to its row."""
    return charged_with(
        lambda config, flops, parameters: {
            "attention_per_token": flops.attention_per_token
            * flops.num_tokens
            // flops.context_tokens
        }
    )(reference)


@fault(role="training_flops", caught_by=[*EVERY_TRACE, ANY_SUM], seen_in="own")
def gains_and_biases_multiplied(reference):
    """Charges a product for gains and biases, which are no matrices."""
    return charged_with(
        lambda config, flops, parameters: {
            "weights_per_token": flops.weights_per_token + 6 * parameters.undecayed
        }
    )(reference)


@fault(role="training_flops", caught_by=LAYERS_AGAIN, seen_in="own")
def checkpointing_in_the_model(reference):
    """Adds the second forward pass of the layers to what the model needs."""
    return charged_with(
        lambda config, flops, parameters: {
            "weights_per_token": flops.weights_per_token + flops.recomputed_per_token,
            "recomputed_per_token": 0,
        }
    )(reference)


@fault(role="training_flops", caught_by=LAYERS_AGAIN, seen_in="own")
def head_run_twice(reference):
    """Charges a second forward pass of the head, which checkpointed layers do not contain."""
    return charged_with(
        lambda config, flops, parameters: {
            "recomputed_per_token": flops.recomputed_per_token
            + 2 * (parameters.head or parameters.embedding) * flops.convention.recompute_layers
        }
    )(reference)


@benign(
    role="training_flops",
    accepted_by=["m0_flops::test_plan", "m0_flops::test_traced", ANY_TRACED, ANY_SUM],
    because="the same products, added up matrix by matrix and head by head",
)
def matrix_by_matrix(reference):
    """Adds 2 x rows x columns for each product of each layer, forward and both backward."""

    def training_flops(config, num_tokens, context_tokens, convention):
        if convention.weights != "products" or convention.recompute_layers:
            return reference.training_flops(config, num_tokens, context_tokens, convention)
        D, V = config.model_width, config.vocabulary_size
        if isinstance(config, DecoderConfig):
            N, K, F = config.num_query_heads, config.num_kv_heads, config.feed_forward_width
            feed_forward = [(D, F), (D, F), (F, D)]
        else:
            N = K = config.num_heads
            feed_forward = [(D, 4 * D), (4 * D, D)]
        H = config.head_width
        matrices = [(D, N * H), (D, K * H), (D, K * H), (N * H, D), *feed_forward]
        weights = attention = 0
        for _product in ("output", "gradient of the input", "gradient of the weight"):
            weights += 2 * D * V
            for _layer in range(config.num_layers):
                weights += sum(2 * rows * columns for rows, columns in matrices)
                attention += sum(
                    2 * 2 * context_tokens * H * convention.kappa // 12 for _head in range(N)
                )
        again = attention // 6 if convention.recompute_scores else 0
        return TrainingFlops(weights, attention, again, num_tokens, context_tokens, convention)

    return training_flops
