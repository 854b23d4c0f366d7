"""Is the output of a configuration the baseline's output?

fp32 is compared token by token. In 16 bit, another batch shape rounds differently, so at the first
divergence of a prompt the baseline's margin (log-probability of its best token minus that of the
second) decides: below epsilon it was a near-tie. Epsilon and the rate of near-ties come from the
baseline against itself: repeated, with another batch size, and *forced*: its own text run as a
prompt, many tokens at once, through the kernels that a verify uses too. In a MoE, rounding may
choose another expert, which moves a margin by far more than a step of rounding; so a divergence is
forced as well, and where plain decoding takes the same token that way, it was rounding.

Such moves are rare and large (two ranks of the tiny model: 0.66 nats at one place of 512, where
fp32 confirms the configuration, not the baseline), so a largest one of a sample is no bound of the
next: of many prompts a few may exceed epsilon, by a factor at most. What is really wrong exceeds it
in many prompts, or by far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import chi2, poisson

from autotune.digits import significant
from autotune.records import OutputCheck

#: epsilon is this many times the largest change of a margin that the baseline showed by itself
EPSILON_SAFETY = 1.5
#: least epsilon, nats: bfloat16 logits of 8 to 16 lie 2^-4 apart, so a smaller margin is below one
#: step of rounding, also where the baseline's own runs happen to round alike
EPSILON_FLOOR = 2.0**-4
#: most epsilon, nats: a baseline that differs from itself by more is broken, which excuses nothing
EPSILON_CEILING = 1.0
#: one prompt in so many may exceed epsilon, and at most so many times epsilon
OUTLIER_PROMPTS, OUTLIER_FACTOR = 8, 4.0
#: places of one check at which plain decoding is forced, and those of a prompt past its divergence
MOST_FORCED, LATER_PLACES = 24, 2
#: places at which the baseline's own text is forced, once a workload: the smallest margins, since
#: divergences are there. Where prompts are long, fewer: so many tokens in all
NOISE_PLACES, NOISE_TOKENS = 64, 65_536
#: nats; where the baseline's lead is larger, how far it moves says little of where tokens change
CLOSE = 2.0
#: chance that a faithful configuration exceeds its bound of near-ties
FALSE_ALARM = 1e-3

Tokens = Sequence[Sequence[int]]
#: prompt index, and the text after the prompt before the token in question
Place = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Forced:
    """Plain decoding's next token after a text that is run as a prompt, the second, the margin."""

    token: int
    second: int | None
    margin: float


Force = Callable[[Sequence[Place]], Sequence[Forced]]


@dataclass(frozen=True, slots=True)
class Reference:
    """Baseline output: token ids and top-2 margins (nats) by prompt; None without log-probs."""

    tokens: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...] | None
    #: the second best token at each place; None where it is not told
    seconds: tuple[tuple[int, ...], ...] | None = None

    def prefix(self, num_prompts: int) -> "Reference":
        """The first ``num_prompts`` prompts."""
        margins = None if self.margins is None else self.margins[:num_prompts]
        seconds = None if self.seconds is None else self.seconds[:num_prompts]
        return Reference(self.tokens[:num_prompts], margins, seconds)


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

    Margins are compared up to the first divergence, where both runs saw the same text, and below
    ``CLOSE``. Each
    ``again`` may hold fewer prompts and fewer tokens of each than ``reference``; of one without
    margins divergences count, and what they say at least: the baseline's margin was overcome.
    """
    if reference.margins is None or not again:
        return None
    largest, divergences, tokens = 0.0, 0, 0
    for run in again:
        for index, (mine, theirs) in enumerate(zip(run.tokens, reference.tokens, strict=False)):
            split = first_divergence(mine, theirs[: len(mine)])
            same = len(mine) if split is None else split
            tokens += same
            base = reference.margins[index]
            # the unknown margins of a run are taken as equal, and as 0 where it diverges
            own = (*base[:same], 0.0) if run.margins is None else run.margins[index]
            # at the split the sign of the margin flips: both margins count in full
            moved = zip(own[:same], base[:same], strict=True)
            largest = max([largest, *(abs(a - b) for a, b in moved if b < CLOSE)])
            if split is not None:
                divergences += 1
                if split < min(len(own), len(base)):
                    largest = max(largest, own[split] + base[split])
    return SelfNoise(_epsilon(largest), divergences, max(tokens, 1))


def _epsilon(largest: float) -> float:
    return min(max(EPSILON_SAFETY * largest, EPSILON_FLOOR), EPSILON_CEILING)


def probe_places(reference: Reference, prompt_len: int = 1) -> list[Place]:
    """Places to force for noise: the smallest margins, after prompts of ``prompt_len`` tokens."""
    assert reference.margins is not None
    wanted = min(NOISE_PLACES, max(NOISE_TOKENS // prompt_len, MOST_FORCED))
    # the first token is a prompt's own in any case
    later = [
        (margin, index, at)
        for index, margins in enumerate(reference.margins)
        for at, margin in enumerate(margins)
        if at > 0
    ]
    chosen = sorted((index, at) for _, index, at in sorted(later)[:wanted])
    return [(index, reference.tokens[index][:at]) for index, at in chosen]


def with_forced(
    noise: SelfNoise, reference: Reference, places: Sequence[Place], forced: Sequence[Forced]
) -> SelfNoise:
    """``noise`` widened by what the baseline shows where its own text is forced (``probe_places``).

    Elsewhere, where margins are larger, nothing is taken to change.
    """
    assert reference.margins is not None
    largest, flips = 0.0, 0
    for (index, text), found in zip(places, forced, strict=True):
        mine = reference.margins[index][len(text)]
        if found.token == reference.tokens[index][len(text)]:
            largest = max(largest, abs(found.margin - mine) if mine < CLOSE else 0.0)
        else:
            flips += 1
            largest = max(largest, found.margin + mine)
    return SelfNoise(
        max(noise.epsilon, min(EPSILON_SAFETY * largest, EPSILON_CEILING)),
        noise.num_divergences + flips,
        noise.num_tokens + sum(len(tokens) - 1 for tokens in reference.tokens),
    )


def check_output(
    output: Tokens,
    reference: Reference | None,
    *,
    exact: bool,
    temperature: float,
    noise: SelfNoise | None = None,
    force: Force | None = None,
) -> Checked:
    """Compare ``output`` with the baseline's on the same prompts.

    ``exact`` (fp32): any difference is incorrect. Otherwise a divergence needs a margin of at most
    epsilon (``OUTLIER_PROMPTS`` and ``OUTLIER_FACTOR`` say what more is allowed), or the same token
    from ``force``; no more prompts may diverge without the latter than the baseline's own rate
    allows. What follows a divergence is forced at a few places.
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
    later: dict[int, tuple[int, float]] = {}
    confirmed = 0
    if force is not None:
        left, later = _forced(output, splits, margins, noise.epsilon, force)
        confirmed = len(margins) - len(left)
        if not left and not later:
            return Checked(
                "near_tie",
                f"{len(splits)} of {len(output)} prompts diverge, each where plain decoding takes "
                f"the same token when the text before it is run as a prompt",
            )
        margins = left
    wrong = _beyond(splits, margins, later, noise.epsilon, len(output))
    if isinstance(wrong, Checked):
        return wrong
    allowed = int(poisson.ppf(1.0 - FALSE_ALARM, noise.rate_bound * max(compared, 1)))
    if len(margins) > max(allowed, 1):
        return Checked(
            "incorrect",
            f"{len(margins)} of {len(output)} prompts diverge over {compared} tokens; the baseline "
            f"against itself ({noise.num_divergences} over {noise.num_tokens}) allows {allowed}",
        )
    also = f", {confirmed} of them as plain decoding of the same text as a prompt does"
    largest = max([*margins.values(), *(margin for _, margin in later.values())])
    few = f"; {wrong} beyond epsilon, as few may" if wrong else ""
    return Checked(
        "near_tie",
        f"{len(splits)} of {len(output)} prompts diverge{also if confirmed else ''}, margins up to "
        f"{significant(largest)} nats (epsilon {significant(noise.epsilon)}){few}",
    )


def _beyond(
    splits: dict[int, int],
    margins: dict[int, float],
    later: dict[int, tuple[int, float]],
    epsilon: float,
    num_prompts: int,
) -> int | Checked:
    """How many prompts exceed ``epsilon`` where that may be chance; a verdict where it is not."""
    sizes = {i: margin for i, margin in margins.items() if margin > epsilon}
    for i, (_, margin) in later.items():
        sizes[i] = max(margin, sizes.get(i, 0.0))
    if not sizes:
        return 0
    i = max(sizes, key=lambda index: sizes[index])
    allowed = num_prompts // OUTLIER_PROMPTS
    if sizes[i] <= OUTLIER_FACTOR * epsilon and len(sizes) <= allowed:
        return len(sizes)
    others = f" (and {len(sizes) - 1} more; {allowed} may)" if len(sizes) > 1 else ""
    if i in later and later[i][1] == sizes[i]:
        return Checked(
            "incorrect",
            f"prompt {i}, token {later[i][0]}, after its divergence at {splits[i]}: plain decoding "
            f"takes another token, by {significant(sizes[i])} nats "
            f"(epsilon {significant(epsilon)}){others}",
        )
    return Checked(
        "incorrect",
        f"prompt {i} diverges at token {splits[i]} where the baseline's margin is "
        f"{significant(sizes[i])} nats, above epsilon {significant(epsilon)}{others}",
    )


def _forced(
    output: Tokens,
    splits: dict[int, int],
    margins: dict[int, float],
    epsilon: float,
    force: Force,
) -> tuple[dict[int, float], dict[int, tuple[int, float]]]:
    """Margins of the divergences that plain decoding does not confirm, and what is wrong later.

    A forced margin between the same two tokens replaces a larger one: rounding differs by path.
    The second: prompt -> (place, margin) where plain decoding takes another token beyond epsilon.
    """
    first = [i for i in splits if splits[i] < len(output[i]) and margins[i] != float("inf")]
    places: list[Place] = [(i, tuple(output[i][: splits[i]])) for i in first[:MOST_FORCED]]
    after = [(i, tuple(output[i][:at])) for i in first for at in _later(splits[i], len(output[i]))]
    num_first = len(places)
    places += after[: MOST_FORCED - num_first]
    left, later = dict(margins), dict[int, tuple[int, float]]()
    for number, ((i, text), found) in enumerate(zip(places, force(places), strict=True)):
        emitted, at = output[i][len(text)], len(text)
        if number >= num_first:
            # where three tokens lie together the emitted one may be neither of the two told
            if found.token != emitted and found.margin > max(epsilon, later.get(i, (0, 0.0))[1]):
                later[i] = (at, found.margin)
        elif found.token == emitted:
            del left[i]
        elif found.second == emitted:
            left[i] = min(left[i], found.margin)
    return left, later


def _later(split: int, length: int) -> list[int]:
    """Places past a divergence, evenly spread, the last token among them."""
    rest = length - split - 1
    count = min(LATER_PLACES, rest)
    return [split + rest * number // count for number in range(1, count + 1)]
