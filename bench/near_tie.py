"""Whether bf16 outputs that differ do so at near-ties: noise measured, threshold, verdict.

A difference between two correct bf16 runs needs the two best tokens to be closer than what
rounding moves their margin by. How far that is, is measured: margins of a bf16 run against an fp32
run of the same bf16 weights, at the same prefixes. Each of two runs is off by the largest such
noise at most, so a difference is a near-tie when the exact (fp32) margin is within twice that, and
the two tokens are the two best.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.results import RequestResult


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a request's outputs differ."""

    request: int
    position: int
    plain: int
    other: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A difference beside the exact margin of its place."""

    difference: Difference
    #: lead of the exact best token over the second, in log-probability
    margin: float
    #: whether the two tokens are the exact best two
    best_two: bool

    def is_near_tie(self, threshold: float) -> bool:
        """Whether rounding explains it."""
        return self.best_two and self.margin <= threshold


def first_differences(
    plain: Sequence[RequestResult], other: Sequence[RequestResult]
) -> list[Difference]:
    """Where outputs of the same requests part, one entry a differing request."""
    found = []
    for index, (a, b) in enumerate(zip(plain, other, strict=True)):
        for position, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
            if x != y:
                found.append(Difference(index, position, x, y))
                break
    return found


def margin_noise(exact: Sequence[RequestResult], rounded: Sequence[RequestResult]) -> list[float]:
    """How far margins of a rounded run are from the exact ones, at places with the same prefix.

    Where the runs part, the rounded margin counts against the exact order; what follows is another
    text. A place where a third token comes in says nothing about this margin.
    """
    noise = []
    for a, b in zip(exact, rounded, strict=True):
        rows = zip(
            a.token_ids, a.runners_up, a.margins, b.token_ids, b.runners_up, b.margins, strict=True
        )
        for best, second, margin, best_b, second_b, margin_b in rows:
            if (best, second) == (best_b, second_b):
                noise.append(abs(margin - margin_b))
            elif (best, second) == (second_b, best_b):
                noise.append(margin + margin_b)
            if best != best_b:
                break
    return noise


def threshold_of(noise: Sequence[float]) -> float:
    """Twice the largest noise seen."""
    return 2.0 * max(noise)


def judge(difference: Difference, forced: RequestResult) -> Judged:
    """``forced``: one token of an exact run after the plain output up to the difference."""
    best_two = {forced.token_ids[0], forced.runners_up[0]}
    same = best_two == {difference.plain, difference.other}
    return Judged(difference, forced.margins[0], same)
