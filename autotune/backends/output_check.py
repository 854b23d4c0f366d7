"""Is the output of a configuration the baseline's output?

fp32 is compared token by token. In 16 bit, another batch shape rounds differently, so at the first
divergence of a prompt the baseline's margin (log-probability of its best token minus that of the
second) decides: below epsilon it was a near-tie. Epsilon and the rate of near-ties come from the
baseline against itself, repeated and with another batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import chi2, poisson

from autotune.records import OutputCheck

#: epsilon is this many times the largest change of a margin that the baseline showed by itself
EPSILON_SAFETY = 1.5
#: least epsilon, nats: bfloat16 logits of 8 to 16 lie 2^-4 apart, so a smaller margin is below one
#: step of rounding, also where the baseline's own runs happen to round alike
EPSILON_FLOOR = 2.0**-4
#: chance that a faithful configuration exceeds its bound of near-ties
FALSE_ALARM = 1e-3

Tokens = Sequence[Sequence[int]]
Margins = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Reference:
    """Baseline output: token ids and top-2 margins (nats) by prompt; None without log-probs."""

    tokens: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...] | None

    def prefix(self, num_prompts: int) -> "Reference":
        """The first ``num_prompts`` prompts."""
        margins = None if self.margins is None else self.margins[:num_prompts]
        return Reference(self.tokens[:num_prompts], margins)


@dataclass(frozen=True, slots=True)
class SelfNoise:
    """What the baseline shows against itself."""

    #: a divergence below this margin is a near-tie, nats
    epsilon: float
    num_divergences: int
    num_tokens: int

    @property
    def rate_bound(self) -> float:
        """Upper 95 % bound of divergences per token (exact Poisson)."""
        return float(chi2.ppf(0.95, 2 * (self.num_divergences + 1)) / (2 * self.num_tokens))


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdict and what it rests on, one sentence."""

    verdict: OutputCheck
    reason: str


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first difference (the shorter length when one is a prefix), or None."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def self_noise(reference: Reference, again: Sequence[Reference]) -> SelfNoise | None:
    """Noise of the baseline from runs of the same prompts; None without margins or runs.

    Margins are compared up to the first divergence, where both runs saw the same text. Each
    ``again`` may hold fewer prompts than ``reference``.
    """
    if reference.margins is None or not again:
        return None
    largest, divergences, tokens = 0.0, 0, 0
    for run in again:
        if run.margins is None:
            return None
        for index, (mine, theirs) in enumerate(zip(run.tokens, reference.tokens, strict=False)):
            split = first_divergence(mine, theirs)
            same = min(len(mine), len(theirs)) if split is None else split
            tokens += same
            own, base = run.margins[index], reference.margins[index]
            # at the split the sign of the margin flips: both margins count in full
            largest = max(
                [largest, *(abs(a - b) for a, b in zip(own[:same], base[:same], strict=True))]
            )
            if split is not None:
                divergences += 1
                if split < min(len(own), len(base)):
                    largest = max(largest, own[split] + base[split])
    epsilon = max(EPSILON_SAFETY * largest, EPSILON_FLOOR)
    return SelfNoise(epsilon, divergences, max(tokens, 1))


def check_output(
    output: Tokens,
    reference: Reference | None,
    *,
    exact: bool,
    temperature: float,
    noise: SelfNoise | None = None,
) -> Checked:
    """Compare ``output`` with the baseline's on the same prompts.

    ``exact`` (fp32): any difference is incorrect. Otherwise a divergence needs a margin of at most
    epsilon, and no more prompts may diverge than the baseline's own rate allows.
    """
    if temperature > 0:
        return Checked(
            "unverified",
            f"temperature {temperature:g}: sampled output differs from run to run by design",
        )
    if reference is None:
        return Checked("unverified", "no baseline output of these prompts")
    if len(output) != len(reference.tokens):
        raise ValueError(f"{len(output)} outputs, {len(reference.tokens)} in the baseline")
    splits = {
        index: split
        for index, (mine, theirs) in enumerate(zip(output, reference.tokens, strict=True))
        if (split := first_divergence(mine, theirs)) is not None
    }
    compared = sum(splits.get(index, len(tokens)) for index, tokens in enumerate(reference.tokens))
    if not splits:
        return Checked("exact", f"{compared} tokens of {len(output)} prompts equal the baseline's")
    index, split = min(splits.items())
    where = f"prompt {index} diverges at token {split}"
    if exact:
        return Checked("incorrect", f"{where}; fp32 output must be equal")
    if reference.margins is None or noise is None:
        return Checked("unverified", f"{where}; no log-probabilities to judge it by")
    # a position past the end (one output stopped early) has no margin: not a tie
    margins = {
        i: reference.margins[i][s] if s < len(reference.margins[i]) else float("inf")
        for i, s in splits.items()
    }
    worst = max(margins, key=lambda i: margins[i])
    if margins[worst] > noise.epsilon:
        return Checked(
            "incorrect",
            f"prompt {worst} diverges at token {splits[worst]} where the baseline's margin is "
            f"{margins[worst]:.3g} nats, above epsilon {noise.epsilon:.3g}",
        )
    allowed = int(poisson.ppf(1.0 - FALSE_ALARM, noise.rate_bound * max(compared, 1)))
    if len(splits) > max(allowed, 1):
        return Checked(
            "incorrect",
            f"{len(splits)} of {len(output)} prompts diverge over {compared} tokens; the baseline "
            f"against itself ({noise.num_divergences} over {noise.num_tokens}) allows {allowed}",
        )
    return Checked(
        "near_tie",
        f"{len(splits)} of {len(output)} prompts diverge, margins up to {margins[worst]:.3g} nats "
        f"(epsilon {noise.epsilon:.3g})",
    )
