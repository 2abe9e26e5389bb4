"""Wrong ways to generate: the wrong position, the wrong rule, the wrong draw."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from harness import benign, fault
from reference.generate import next_logits

GATE = "m4_generation::"
STEPS, TRANSFORMERS, DRAWS, TIES, SEED, EOS = (
    f"{GATE}test_{name}"
    for name in ("every_step", "transformers", "distribution", "ties", "seed", "eos")
)
RANDOM_TWINS = [f"{TRANSFORMERS}[{kind}]" for kind in ("qwen2", "llama")]


def steps(limits, families=("decoder", "chargpt")):
    return [f"{STEPS}[{limit}-{family}]" for limit in limits for family in families]


def choose(logits_V, settings, generator):
    """A token by the rule of the reference, with a multinomial draw."""
    if settings.temperature == 0:
        return int(logits_V.argmax())
    ordered, tokens = logits_V.sort(descending=True, stable=True)
    p = (ordered[: settings.top_k] / settings.temperature).softmax(-1)
    return int(tokens[torch.multinomial(p, 1, generator=generator)])


def looping(read=None, choose=choose):
    """A generate of its own loop: read() makes a (model, tokens) -> logits [V] for each text."""

    def last(model, tokens):
        return next_logits(model, tokens[-model.config.max_positions :])

    def generate(model, prompt, num_tokens, settings):
        generator = torch.Generator().manual_seed(settings.seed)
        tokens, reader = prompt.tolist(), (read or (lambda: last))()
        for _ in range(num_tokens):
            tokens.append(choose(reader(model, tokens), settings, generator))
            if tokens[-1] == settings.eos:
                break
        return torch.tensor(tokens[len(prompt) :])

    return generate


def reading(logits):
    """A generate that takes its logits from logits(model, tokens)."""
    return looping(read=lambda: logits)


# --- positions -------------------------------------------------------------------------------


@torch.no_grad()
def whole(model, tokens, positions=None):
    """Logits [T, V] after every token."""
    device = model.lm_head.weight.device
    positions = None if positions is None else torch.tensor([positions], device=device)
    hidden = model(torch.tensor([tokens], device=device), positions)[0]
    return F.linear(hidden, model.lm_head.weight).cpu().double()


@fault(
    role="generate",
    caught_by=[*steps(["inside", "beyond", "prompt-beyond"]), *RANDOM_TWINS],
    seen_in="own",
)
def reads_the_position_before(reference):
    """Takes the logits after the last token but one."""
    return reading(lambda model, tokens: whole(model, tokens[-model.config.max_positions :])[-2])


@fault(
    role="generate",
    caught_by=[*steps(["inside", "beyond", "prompt-beyond"], ["chargpt"])],
    seen_in="own",
)
def counts_positions_from_one(reference):
    """Gives the first token position 1, so that learned positions are shifted."""

    def logits(model, tokens):
        seen = tokens[-model.config.max_positions :]
        last = model.config.max_positions - 1
        return whole(model, seen, [min(t + 1, last) for t in range(len(seen))])[-1]

    return reading(logits)


@fault(role="generate", caught_by=steps(["beyond", "prompt-beyond"]), seen_in="own")
def keeps_the_first_tokens(reference):
    """Beyond the context it reads the first max_positions tokens, for ever the same."""
    return reading(lambda model, tokens: next_logits(model, tokens[: model.config.max_positions]))


@fault(role="generate", caught_by=steps(["beyond", "prompt-beyond"]), seen_in="own")
def forgets_one_token_too_many(reference):
    """Beyond the context it reads the last max_positions - 1 tokens."""

    def logits(model, tokens):
        limit = model.config.max_positions
        return next_logits(model, tokens if len(tokens) <= limit else tokens[1 - limit :])

    return reading(logits)


# --- the rule --------------------------------------------------------------------------------


def choosing(reference, change):
    """The reference's generate with changed settings."""

    def generate(model, prompt, num_tokens, settings):
        return reference.generate(model, prompt, num_tokens, change(settings))

    return generate


@fault(role="generate", caught_by=[f"{DRAWS}[0.5]", f"{DRAWS}[2]"], seen_in="own")
def ignores_the_temperature(reference):
    """Draws at temperature 1 whatever was asked, unless it is 0."""
    return choosing(reference, lambda s: replace(s, temperature=1.0) if s.temperature else s)


@fault(role="generate", caught_by=DRAWS + "[0.5]", seen_in="own")
def divides_after_the_softmax(reference):
    """Applies the temperature to probabilities instead of logits, and normalises again."""

    def late(logits_V, settings, generator):
        p = logits_V.softmax(-1) / max(settings.temperature, 1e-9)
        return choose(p, replace(settings, temperature=float(settings.temperature > 0)), generator)

    return looping(choose=late)


TOP = [f"{DRAWS}[{case}]" for case in ("1-top-2", "2-top-3-of-equals", "1-top-1")]


@fault(role="generate", caught_by=[*TOP, f"{TIES}[top-1]"], seen_in="own")
def keeps_one_too_many(reference):
    """Keeps the k + 1 largest logits."""
    return choosing(reference, lambda s: s if s.top_k is None else replace(s, top_k=s.top_k + 1))


@fault(
    role="generate",
    caught_by=[
        f"{DRAWS}[2-top-3-of-equals]",
        f"{DRAWS}[2-top-4-of-equals]",
        f"{TIES}[top-1]",
    ],
    seen_in="karpathy/minGPT, karpathy/nanoGPT: logits[logits < v[:, [-1]]] = -inf",
)
def keeps_every_equal(reference):
    """Keeps every logit that is not below the k-th: more than k where several are equal."""

    def threshold(logits_V, settings, generator):
        if settings.top_k is not None:
            smallest = logits_V.topk(settings.top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
        return choose(logits_V, replace(settings, top_k=None), generator)

    return looping(choose=threshold)


@fault(role="generate", caught_by=[TIES, f"{DRAWS}[2-top-3-of-equals]"], seen_in="own")
def takes_the_highest_of_equals(reference):
    """Decides ties for the highest token."""

    def backwards(logits_V, settings, generator):
        return len(logits_V) - 1 - choose(logits_V.flip(0), settings, generator)

    return looping(choose=backwards)


@fault(role="generate", caught_by=[*steps(["inside"]), *RANDOM_TWINS, f"{TIES}[greedy]"],
       seen_in="own")  # fmt: skip
def draws_at_temperature_zero(reference):
    """Takes temperature 0 for "not set" and draws at 1."""
    return choosing(reference, lambda s: s if s.temperature else replace(s, temperature=1.0))


# --- the draw --------------------------------------------------------------------------------


@fault(role="generate", caught_by=SEED, seen_in="own")
def ignores_the_seed_of_draws(reference):
    """Draws from seed 0 whatever was asked."""
    return choosing(reference, lambda s: replace(s, seed=0))


@fault(role="generate", caught_by=SEED, seen_in="own")
def draws_tokens_from_the_global_generator(reference):
    """Draws from torch's global generator."""
    return looping(choose=lambda logits, settings, generator: choose(logits, settings, None))


@fault(role="generate", caught_by=SEED, seen_in="own")
def seeds_every_token_anew(reference):
    """Makes the generator again for each token: all are drawn with the same number."""

    def anew(logits_V, settings, generator):
        return choose(logits_V, settings, torch.Generator().manual_seed(settings.seed))

    return looping(choose=anew)


@fault(role="generate", caught_by=SEED, seen_in="own")
def leaves_evaluation_mode_on(reference):
    """Puts the model into evaluation mode and leaves it there."""

    def generate(model, prompt, num_tokens, settings):
        tokens = reference.generate(model, prompt, num_tokens, settings)
        model.eval()
        return tokens

    return generate


@fault(role="generate", caught_by=EOS, seen_in="huggingface/trl#976")
def never_stops(reference):
    """Goes on after the end of the text."""
    return choosing(reference, lambda s: replace(s, eos=None))


@fault(role="generate", caught_by=EOS, seen_in="own")
def drops_the_end(reference):
    """Leaves the eos out of the text."""

    def generate(model, prompt, num_tokens, settings):
        tokens = reference.generate(model, prompt, num_tokens, settings)
        return tokens[tokens != settings.eos] if settings.eos is not None else tokens

    return generate


@fault(role="generate", caught_by=[STEPS, *RANDOM_TWINS, TIES, EOS], seen_in="own")
def returns_the_prompt_too(reference):
    """Returns prompt and text."""

    def generate(model, prompt, num_tokens, settings):
        tokens = reference.generate(model, prompt, num_tokens, settings)
        return torch.cat([prompt, tokens])

    return generate


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="generate",
    accepted_by=[DRAWS, TIES, SEED, EOS],
    because="argmax of z / temperature + Gumbel noise has the softmax's distribution",
)
def adds_gumbel_noise(reference):
    """The Gumbel-max trick instead of a draw from the cumulative sum."""

    def gumbel(logits_V, settings, generator):
        ordered, tokens = logits_V.sort(descending=True, stable=True)
        kept = ordered[: settings.top_k]
        if settings.temperature == 0:
            return int(tokens[0])
        noise = torch.rand(len(kept), dtype=torch.float64, generator=generator)
        return int(tokens[(kept / settings.temperature - (-noise.log()).log()).argmax()])

    return looping(choose=gumbel)
