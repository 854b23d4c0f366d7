"""Noise of a simulated host: drift, two host speeds, outliers, jitter; deterministic per seed.

What varies with time (drift, host speed) is a function of the simulated time alone; what varies
from repeat to repeat is drawn from a stream named by the repeat. So a repeat's noise does not
depend on which repeats came before it.
"""

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np

#: grid on which drift and host speed change, simulated seconds
STEP_S = 10.0


def stream(seed: int, *names: object) -> np.random.Generator:
    """The random stream called ``names`` under ``seed``; equal names give equal draws."""
    text = "|".join(str(part) for part in (seed, *names))
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


@dataclass
class Drift:
    """AR(1) drift of the log time: stationary sd ``sd``, correlation time ``time_s``."""

    seed: int
    sd: float
    time_s: float
    _path: list[float] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._draws = stream(self.seed, "drift")

    def factor(self, at_s: float) -> float:
        """Multiplier of every time at simulated second ``at_s`` (>= 0), linear between steps."""
        position = at_s / STEP_S
        low = int(position)
        self._extend_to(low + 1)
        share = position - low
        return math.exp(self._path[low] * (1.0 - share) + self._path[low + 1] * share)

    def _extend_to(self, index: int) -> None:
        rho = math.exp(-STEP_S / self.time_s)
        while len(self._path) <= index:
            shock = float(self._draws.normal())
            if not self._path:
                self._path.append(self.sd * shock)
            else:
                innovation = self.sd * math.sqrt(1.0 - rho**2) * shock
                self._path.append(rho * self._path[-1] + innovation)


@dataclass
class HostSpeed:
    """A host that is slow for a share of the time and fast otherwise (a two-state Markov chain).

    Eager steps of one and the same configuration took 18 or 29 ms from run to run on a real host
    while graphed ones repeated within 0.5 % (studies/results/published, 2 x H200), so only what
    the host launches feels it.
    """

    seed: int
    slow_share: float
    slow_factor: float
    dwell_s: float
    _slow: list[bool] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._draws = stream(self.seed, "host")

    def factor(self, at_s: float) -> float:
        """Multiplier of host-launched time at simulated second ``at_s``."""
        index = int(at_s / STEP_S)
        switch = 1.0 - math.exp(-STEP_S / self.dwell_s)
        while len(self._slow) <= index:
            draw = float(self._draws.random())
            if not self._slow or draw < switch:
                self._slow.append(float(self._draws.random()) < self.slow_share)
            else:
                self._slow.append(self._slow[-1])
        return self.slow_factor if self._slow[index] else 1.0


def outlier_factor(draws: np.random.Generator, rate: float, size: float) -> float:
    """1, or with probability ``rate`` a slow-down of at least ``size`` with a Pareto(2.5) tail."""
    hit = draws.random() < rate
    excess = float(draws.pareto(2.5))
    return 1.0 + size * (1.0 + excess) if hit else 1.0
