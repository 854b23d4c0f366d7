"""Where bf16 outputs part, how wide the exact model's choice is there, and how wide rounding is.

The verdict is ``autotune.backends.output_check``'s; this is what it stands on, place by place: the
exact (fp32) margin at each first difference, whether the two tokens are the exact best two, and by
how much bf16 moves margins at the same prefixes.
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


def judge(difference: Difference, forced: RequestResult) -> Judged:
    """``forced``: one token of an exact run after the plain output up to the difference."""
    best_two = {forced.token_ids[0], forced.runners_up[0]}
    same = best_two == {difference.plain, difference.other}
    return Judged(difference, forced.margins[0], same)
