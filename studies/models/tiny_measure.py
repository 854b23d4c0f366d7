"""Greedy generation and the accept length of a drafted chain, in plain torch.

``chain_counts`` uses that greedy speculative output equals greedy plain output: it generates
plainly, drafts a chain from every position at once, and walks the verify cycles over the result.
``naive_chain_counts`` runs the real loop, one prompt and one full forward at a time, and shares
no attention code with it; the two must count the same.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from tiny_eagle import EagleHead, Unroll, aux_layers
from tiny_moe import TinyMoe


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCounts:
    """Counts over all verify cycles; accept length includes the bonus token."""

    num_verifies: int
    #: accepted_by_depth[d - 1]: cycles that accepted at least d drafts
    accepted_by_depth: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        return 1 + sum(self.accepted_by_depth) / max(1, self.num_verifies)

    def report(self) -> dict[str, object]:
        """Counts with accept length and conditional acceptance by depth."""
        before = (self.num_verifies, *self.accepted_by_depth)
        conditional = [
            round(n / b, 4) if b else None
            for n, b in zip(self.accepted_by_depth, before, strict=False)
        ]
        return {
            **asdict(self),
            "accept_length": round(self.accept_length, 4),
            "conditional_by_depth": conditional,
        }


@torch.no_grad()
def generate(
    target: TinyMoe, prompts_BP: torch.Tensor, num_new: int, temperature: float, seed: int = 0
) -> torch.Tensor:
    """Prompts with ``num_new`` generated tokens each, [B, P + num_new]; end-of-text is ignored."""
    B, P = prompts_BP.shape
    generator = torch.Generator(prompts_BP.device).manual_seed(seed)
    ids = torch.cat([prompts_BP, prompts_BP.new_zeros(B, num_new)], 1)
    in_bf16 = torch.is_autocast_enabled(prompts_BP.device.type)
    like = torch.empty(0, device=ids.device, dtype=torch.bfloat16 if in_bf16 else torch.float32)
    cache = target.new_cache(B, P + num_new, like)
    start = 0
    for at in range(P, P + num_new):
        states, _, _ = target(ids[:, start:at], cache=cache, start=start)
        logits = target.head(states[:, -1]).float()
        if temperature == 0:
            ids[:, at] = logits.argmax(-1)
        else:
            p = (logits / temperature).softmax(-1)
            ids[:, at] = torch.multinomial(p, 1, generator=generator)[:, 0]
        start = at
    return ids


@torch.no_grad()
def chain_counts(
    target: TinyMoe, head: EagleHead, ids_BS: torch.Tensor, prompt_len: int, steps: int
) -> tuple[ChainCounts, list[float]]:
    """Counts of a greedy chain of ``steps`` on greedy continuations; per-prompt accept lengths."""
    S = ids_BS.shape[1]
    _, aux, _ = target(ids_BS, aux_layers(target.c))
    rows = S - 1
    unroll = Unroll(head, head.fuse([a[:, :rows] for a in aux]))
    token = ids_BS[:, 1:]
    hits = []
    for k in range(steps):
        token = head.keep_V[unroll.step(target.embed(token)).argmax(-1)]
        # row p's k-th draft is for position p + 2 + k; nothing is known beyond the sequence
        truth = torch.full_like(token, -1)
        truth[:, : rows - 1 - k] = ids_BS[:, k + 2 :]
        hits.append(token == truth)
    accepted_BR = torch.stack(hits).long().cumprod(0).sum(0).cpu()
    return _walk(lambda b, row: int(accepted_BR[b, row]), len(ids_BS), prompt_len, S, steps)


def _walk(
    accepted: Callable[[int, int], int], num_prompts: int, prompt_len: int, length: int, steps: int
) -> tuple[ChainCounts, list[float]]:
    """Walk the cycles; one that could run beyond the known tokens is not counted."""
    by_depth, total, per_prompt = [0] * steps, 0, []
    for b in range(num_prompts):
        # the prefill has emitted the token at prompt_len, which row prompt_len - 1 reads
        row, emitted, verifies = prompt_len - 1, 0, 0
        while row + 1 + steps < length:
            n = accepted(b, row)
            for d in range(n):
                by_depth[d] += 1
            row += n + 1
            emitted += n + 1
            verifies += 1
        total += verifies
        per_prompt.append(emitted / max(1, verifies))
    return ChainCounts(num_verifies=total, accepted_by_depth=tuple(by_depth)), per_prompt


@torch.no_grad()
def naive_chain_counts(
    target: TinyMoe, head: EagleHead, prompts_BP: torch.Tensor, num_new: int, steps: int
) -> ChainCounts:
    """The real loop, without caches: draft, verify in one forward, accept, repeat."""
    P = prompts_BP.shape[1]

    def accepted_for(b: int) -> Callable[[int, int], int]:
        ids = prompts_BP[b].tolist()
        states, _, _ = target(torch.tensor([ids], device=prompts_BP.device))
        ids.append(int(target.head(states[0, -1]).argmax()))

        def accepted(_: int, row: int) -> int:
            assert row == len(ids) - 2
            tokens = torch.tensor([ids], device=prompts_BP.device)
            _, aux, _ = target(tokens[:, :-1], aux_layers(target.c))
            hidden, embed = head.fuse(aux), target.embed(tokens[:, 1:])
            draft: list[int] = []
            for _step in range(steps):
                out = head.sequence(hidden, embed)[:, -1:]
                draft.append(int(head.keep_V[head.logits(out)[0, 0].argmax()]))
                next_embed = target.embed(torch.tensor([[draft[-1]]], device=tokens.device))
                hidden, embed = torch.cat([hidden, out], 1), torch.cat([embed, next_embed], 1)
            verify = torch.tensor([ids + draft], device=tokens.device)
            states, _, _ = target(verify)
            best = target.head(states[0, len(ids) - 1 :]).argmax(-1).tolist()
            n = 0
            while n < steps and draft[n] == best[n]:
                n += 1
            ids.extend([*draft[:n], best[n]])
            return n

        return accepted

    by_depth, total = [0] * steps, 0
    for b in range(len(prompts_BP)):
        counts, _ = _walk(accepted_for(b), 1, P, P + num_new, steps)
        total += counts.num_verifies
        by_depth = [x + y for x, y in zip(by_depth, counts.accepted_by_depth, strict=True)]
    return ChainCounts(num_verifies=total, accepted_by_depth=tuple(by_depth))


def distinct_share(continuation: list[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams: 1 for text that never repeats, near 0 for a loop."""
    grams = [tuple(continuation[i : i + n]) for i in range(len(continuation) - n + 1)]
    return len(set(grams)) / max(1, len(grams))
