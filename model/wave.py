"""How many cycles a batch takes whose requests start together and decode a fixed length each.

A request of L tokens after the first needs N cycles; cycles emit 1 to steps + 1 tokens, so N is a
renewal count: E[N] = L / tau + overshoot, Var[N] = L s^2 / tau^3 (s: sd of what one cycle emits).
Prompts differ, too: some are easier to draft for throughout. The batch ends with its slowest
request, and tokens a second are all tokens over that time; a server that refills its batch has no
such end, and its speed is requests x tau / cycle.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.normal import ndtri

Array = NDArray[Any]

#: sd of the logit of a prompt's acceptance rates about the mean of its set: 0.3 to 0.5 in builtin
#: prompts on two trained heads
PROMPT_SD = 0.45
#: share of the sampling noise left where the same prompts were decoded before: greedy texts repeat
_SEEN_NOISE = 0.5


@dataclass(frozen=True, slots=True)
class Wave:
    """Tokens emitted per cycle and request, as the whole batch sees it: log mean and sd."""

    log_tau: float
    log_sd: float


def wave(tau_S: Array, steps: int, *, requests: int, tokens: int, seen: bool, waves: bool) -> Wave:
    """Effective accept length of ``requests`` that decode ``tokens`` each, from samples of tau [S].

    ``seen``: these prompts' own counts are behind ``tau_S``. Without ``waves`` the mean over all
    prompts counts and only its uncertainty is added.
    """
    log_tau = np.log(tau_S)
    middle = float(np.exp(log_tau.mean()))
    if steps < 1 or middle <= 1.0 + 1e-9:
        return Wave(float(log_tau.mean()), float(log_tau.std()))
    length = float(max(tokens, 1))
    own = prompt_rel_sd(middle, steps)
    within = length * emitted_variance(middle, steps) / middle**3
    noise = within * (_SEEN_NOISE**2 if seen else 1.0)
    mean = length / middle
    if not waves:
        between = 0.0 if seen else (mean * own) ** 2
        sd = float(np.sqrt((between + noise) / requests)) / mean
        return Wave(float(log_tau.mean()), float(np.hypot(log_tau.std(), sd)))
    variance = emitted_variance(middle, steps)
    if not seen:
        # a cycle's last tokens may not be wanted: half of what one emits, on a lattice. Counts of
        # a run leave out what it did not want, and so does tau after them
        mean += (variance + middle**2) / (2.0 * middle**2) - 0.5 / middle
    spread = float(np.sqrt(within + (mean * own) ** 2))
    last = mean + spread * largest_normal(requests)
    least, most = np.ceil(length / (steps + 1)), length
    last = float(np.clip(last, least, most))
    between = 0.0 if seen else (mean * own) ** 2
    sd = float(np.sqrt(noise + between)) * largest_normal_sd(requests) / last
    # every sample's time scales like its mean number of cycles
    shift = float(np.log(length / last)) - float(np.log(middle))
    return Wave(float(log_tau.mean()) + shift, float(np.hypot(log_tau.std(), sd)))


def emitted_variance(tau: float, steps: int) -> float:
    """Variance of the tokens of one cycle of mean ``tau`` when every depth is as likely as another.

    P(depth d accepted) = q^d with q such that the mean is right: a chain of one step is Bernoulli.
    """
    depth = np.arange(1, steps + 1)
    low, high = 0.0, 1.0
    for _ in range(40):
        q = 0.5 * (low + high)
        if float((q**depth).sum()) < tau - 1.0:
            low = q
        else:
            high = q
    reach = (0.5 * (low + high)) ** depth
    return max(float(((2 * depth - 1) * reach).sum()) - float(reach.sum()) ** 2, 0.0)


def prompt_rel_sd(tau: float, steps: int) -> float:
    """Relative sd of a prompt's accept length: the logit spread times d log tau / d logit.

    Between none and all accepted, as for a rate: (tau - 1) (1 - (tau - 1) / steps) / tau.
    """
    accepted = min(max(tau - 1.0, 0.0), float(steps))
    return PROMPT_SD * accepted * (1.0 - accepted / steps) / tau


def largest_normal(count: int) -> float:
    """Mean of the largest of ``count`` standard normals (Blom)."""
    return float(ndtri(np.array((count - 0.375) / (count + 0.25)))) if count > 1 else 0.0


def largest_normal_sd(count: int) -> float:
    """Standard deviation of the largest of ``count`` standard normals (within 7 % up to 1,000)."""
    return float((1.0 + 0.95 * np.log(count)) ** -0.5)
