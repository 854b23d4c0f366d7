"""The end of a batch against simulated batches: requests with prompts and cycles of their own."""

import numpy as np
import pytest

from model.wave import (
    PROMPT_SD,
    emitted_variance,
    largest_normal,
    largest_normal_sd,
    prompt_rel_sd,
    wave,
)


def simulated(
    rate: float, steps: int, requests: int, tokens: int, batches: int = 400
) -> tuple[float, float, float]:
    """(accept length, log tokens per cycle of whole batches: mean, sd); rates differ by prompt."""
    rng = np.random.default_rng(7)
    found, emitted, cycles = [], 0, 0
    logit = np.log(rate / (1 - rate))
    for _ in range(batches):
        q = 1.0 / (1.0 + np.exp(-(logit + PROMPT_SD * rng.standard_normal(requests))))
        left = np.full(requests, tokens)
        number = 0
        while (left > 0).any():
            accepted = (rng.random((requests, steps)) < q[:, None]).cumprod(axis=1).sum(axis=1)
            running = left > 0
            emitted += int((accepted + 1)[running].sum())
            cycles += int(running.sum())
            left = left - (accepted + 1)
            number += 1
        found.append(np.log(tokens / number))
    return emitted / cycles, float(np.mean(found)), float(np.std(found))


@pytest.mark.parametrize(
    ("rate", "steps", "requests", "tokens"),
    [
        pytest.param(0.65, 1, 16, 23, id="one-step-16-requests"),
        pytest.param(0.65, 5, 1, 23, id="five-steps-one-request"),
        pytest.param(0.65, 5, 16, 23, id="five-steps-16-requests"),
        pytest.param(0.75, 3, 16, 255, id="long-outputs"),
        pytest.param(0.5, 4, 64, 63, id="64-requests"),
    ],
)
def test_a_batch_ends_when_simulated_ones_do(
    rate: float, steps: int, requests: int, tokens: int
) -> None:
    tau, mean, sd = simulated(rate, steps, requests, tokens)
    found = wave(np.full(8, tau), steps, requests=requests, tokens=tokens, seen=False, waves=True)
    assert found.log_tau == pytest.approx(mean, abs=0.06)
    # slow prompts have a longer tail than the normal one
    assert 0.6 < found.log_sd / sd < 1.6


def test_plain_decoding_has_no_end_to_wait_for() -> None:
    found = wave(np.ones(8), 0, requests=16, tokens=23, seen=False, waves=True)
    assert (found.log_tau, found.log_sd) == (0.0, 0.0)


def test_a_server_that_refills_its_batch_loses_nothing() -> None:
    tau_S = np.array([2.0, 2.2])
    found = wave(tau_S, 3, requests=16, tokens=23, seen=False, waves=False)
    assert found.log_tau == pytest.approx(np.log(tau_S).mean())
    assert found.log_sd > np.log(tau_S).std()


def test_prompts_that_were_counted_leave_less_open() -> None:
    new, seen = (
        wave(np.full(8, 2.4), 4, requests=1, tokens=23, seen=known, waves=True).log_sd
        for known in (False, True)
    )
    assert seen < 0.7 * new


def test_one_step_is_a_coin() -> None:
    assert emitted_variance(1.64, 1) == pytest.approx(0.64 * 0.36, rel=1e-6)
    assert emitted_variance(1.0, 3) == pytest.approx(0.0, abs=1e-6)


def test_prompts_differ_most_where_drafts_are_half_accepted() -> None:
    assert prompt_rel_sd(1.0, 3) == prompt_rel_sd(4.0, 3) == 0.0
    # derivative of 1 + p by the logit of p
    assert prompt_rel_sd(1.5, 1) == pytest.approx(PROMPT_SD * 0.25 / 1.5)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_the_largest_normal_is_as_drawn(count: int) -> None:
    largest = np.random.default_rng(0).standard_normal((20_000, count)).max(axis=1)
    assert largest_normal(count) == pytest.approx(largest.mean(), abs=0.04)
    assert largest_normal_sd(count) == pytest.approx(largest.std(), rel=0.08)
