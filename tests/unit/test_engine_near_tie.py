"""What a judgement of bf16 differences stands on: places, exact margins, and noise."""

import pytest

from bench.near_tie import Difference, first_differences, judge, margin_noise
from engine.results import RequestResult


def _result(
    tokens: tuple[int, ...], seconds: tuple[int, ...] = (), margins: tuple[float, ...] = ()
) -> RequestResult:
    return RequestResult(
        token_ids=tokens,
        finish_reason="length",
        tokens_per_verify=(),
        ttft_s=0.0,
        decode_s=0.0,
        margins=margins,
        runners_up=seconds,
    )


def test_only_the_first_difference_of_a_request_counts() -> None:
    plain = [_result((1, 2, 3, 4)), _result((5, 6)), _result((7,))]
    other = [_result((1, 9, 3, 8)), _result((5, 6)), _result((8,))]
    found = first_differences(plain, other)
    assert found == [Difference(0, 1, 2, 9), Difference(2, 0, 7, 8)]


@pytest.mark.parametrize(
    ("rounded", "expected"),
    [
        pytest.param(_result((1, 2), (5, 6), (0.9, 0.1)), [0.1, 0.1], id="same-order"),
        pytest.param(_result((1, 6), (5, 2), (1.0, 0.3)), [0.0, 0.5], id="swapped-at-the-end"),
        pytest.param(_result((5, 2), (1, 6), (0.1, 0.2)), [1.1], id="another-text-after-a-swap"),
        pytest.param(_result((1, 2), (5, 7), (0.9, 0.1)), [0.1], id="a-third-token"),
    ],
)
def test_noise_is_taken_at_equal_prefixes(rounded: RequestResult, expected: list[float]) -> None:
    exact = _result((1, 2), (5, 6), (1.0, 0.2))
    assert margin_noise([exact], [rounded]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("other", "best_two"),
    [pytest.param(6, True, id="the-two-best"), pytest.param(7, False, id="a-third-token")],
)
def test_a_difference_stands_beside_the_exact_choice(other: int, best_two: bool) -> None:
    judged = judge(Difference(0, 3, 2, other), _result((6,), (2,), (0.19,)))
    assert (judged.margin, judged.best_two) == (0.19, best_two)
