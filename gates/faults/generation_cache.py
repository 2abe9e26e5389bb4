"""Generation with keys and values that are kept: aligned wrong in two ways, and right."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gates.faults.generation import DRAWS, EOS, RANDOM_TWINS, SEED, STEPS, TIES, looping, steps
from harness import benign, fault
from reference.generate import next_logits

CACHED = [*steps(["inside", "beyond"], ["decoder"]), *RANDOM_TWINS]


class Cache:
    """Logits of the last token; the tokens before are not read again, up to max_positions.

    shift: added to the positions of tokens after the first pass. top_left: a query sees the keys up
    to its own index among the queries, as a causal flag without an offset would have it.
    """

    def __init__(self, shift=0, top_left=False):
        self.shift, self.top_left = shift, top_left
        self.twin, self.kept, self.num_kept = None, [], 0

    @torch.no_grad()
    def __call__(self, model, tokens):
        limit = model.config.max_positions
        if len(tokens) > limit:
            return next_logits(model, tokens[-limit:])
        if self.twin is None:
            stack = model.stack.replace({"attention": self.attention})
            with torch.random.fork_rng(devices=[]):
                self.twin = stack.build_model(model.config, stack).to(model.lm_head.weight)
            self.twin.load_state_dict(model.state_dict())
        new = torch.tensor([tokens[self.num_kept :]], device=model.lm_head.weight.device)
        start = self.num_kept + (self.shift if self.num_kept else 0)
        positions = start + torch.arange(new.shape[1], device=new.device)[None]
        before, self.kept = self.kept, []
        self.before = iter(before)
        hidden_D = self.twin(new, positions.clamp(max=limit - 1))[0, -1]
        self.num_kept = len(tokens)
        return F.linear(hidden_D, model.lm_head.weight).cpu().double()

    def attention(self, q, k, v, documents):
        """The layers call it in their order."""
        if self.num_kept:
            k, v = (torch.cat(pair, dim=1) for pair in zip(next(self.before), (k, v), strict=True))
        self.kept.append((k, v))
        num_queries, num_keys = q.shape[1], k.shape[1]
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        visible = visible.tril(0 if self.top_left else num_keys - num_queries)
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)


@fault(role="generate", caught_by=CACHED, seen_in="pytorch/pytorch#103082, #108108, #144858")
def one_query_sees_the_first_key(reference):
    """Aligns the causal mask top-left: a token with a cache before it sees key 0 alone."""
    return looping(read=lambda: Cache(top_left=True))


@fault(role="generate", caught_by=CACHED, seen_in="own")
def rotates_new_tokens_one_too_far(reference):
    """Positions of tokens after the prompt are off by one from those in the cache."""
    return looping(read=lambda: Cache(shift=1))


@benign(
    role="generate",
    accepted_by=[STEPS, *RANDOM_TWINS, DRAWS, TIES, SEED, EOS],
    because="keys and values of tokens that were read do not change",
)
def keeps_keys_and_values(reference):
    """Keeps keys and values up to max_positions, and reads anew beyond."""
    return looping(read=Cache)
