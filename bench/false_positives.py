"""How often `autotune compare` and a study's final comparison see a difference that is not there.

Simulated hosts: the log speed of a run is what the host does then (drift, modes, trend) plus
what happens to that run (jitter, outliers). Two equal arms are run in turns and judged by the code
that the tool uses. Rows: kinds of noise; columns: share of 1,000 A/A comparisons called faster or
slower, and the power for true effects.

    .venv/bin/python bench/false_positives.py [--comparisons 1000] [--max-pairs 30] [--json]
"""

import argparse
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ttest_rel

from autotune.comparison import Comparison, pair_order
from autotune.statistics import paired_ratio

Array = NDArray[np.float64]

#: standard deviation of the log speed of single runs of a quiet server
CV = 0.015
MARGIN = 0.01
#: pairs of a study's final comparison
FINAL_PAIRS = 6
EFFECTS = (0.02, 0.05)


def _jitter(rng: np.random.Generator, n: int) -> Array:
    return CV * rng.standard_normal(n)


def _heavy(rng: np.random.Generator, n: int) -> Array:
    """Student t with 3 degrees of freedom, and 5 % of runs slower by 10 % and more (Pareto)."""
    outliers = rng.random(n) < 0.05
    noise: Array = CV * rng.standard_t(3, n) / math.sqrt(3)
    return noise - np.log1p(0.1 * (1 + rng.pareto(2.5, n))) * outliers


def _modes(rng: np.random.Generator, n: int, dwell: float = 8.0, factor: float = 1.4) -> Array:
    """Two host speeds that last some runs each: 18 or 29 ms for one and the same step."""
    switches = rng.random(n) < 1 / dwell
    slow = (np.cumsum(switches) + rng.integers(0, 2)) % 2
    return _jitter(rng, n) - math.log(factor) * slow


def _autoregressive(rng: np.random.Generator, n: int) -> Array:
    """Drift larger than jitter, correlation 0.5 from run to run (the worst for plain turns)."""
    drift = np.empty(n)
    drift[0] = rng.standard_normal()
    for i in range(1, n):
        drift[i] = 0.5 * drift[i - 1] + math.sqrt(0.75) * rng.standard_normal()
    noise: Array = 2 * CV * drift + _jitter(rng, n) / 3
    return noise


def _trend(rng: np.random.Generator, n: int, total: float = -0.10) -> Array:
    """Clocks that sink from the first run to the last, by 10 % in all."""
    noise: Array = _jitter(rng, n) + np.linspace(0, math.log1p(total), n)
    return noise


def _warm_up(rng: np.random.Generator, n: int) -> Array:
    """The first runs are slower by up to 20 %, decaying over five runs."""
    noise: Array = _jitter(rng, n) + math.log(0.8) * np.exp(-np.arange(n) / 5)
    return noise


def _everything(rng: np.random.Generator, n: int) -> Array:
    noise: Array = (
        _heavy(rng, n)
        + _modes(rng, n, dwell=15.0, factor=1.15)
        + _autoregressive(rng, n) / 2
        + _trend(rng, n, -0.02)
    )
    return noise - _jitter(rng, n)


NOISE: Mapping[str, Callable[[np.random.Generator, int], Array]] = {
    "jitter, cv 1.5 %": _jitter,
    "heavy tails": _heavy,
    "two host speeds": _modes,
    "AR drift": _autoregressive,
    "trend -10 %": _trend,
    "warm-up": _warm_up,
    "all of these": _everything,
}


@dataclass(frozen=True)
class Rates:
    """Shares of comparisons with a verdict, and the pairs they took."""

    faster: float
    slower: float
    same: float
    mean_pairs: float

    @property
    def different(self) -> float:
        """Called faster or slower."""
        return self.faster + self.slower


def sequential(kind: str, effect: float, comparisons: int, max_pairs: int, seed: int) -> Rates:
    """`autotune compare`: random order in each pair, a look every two pairs."""
    rng = np.random.default_rng((seed, zlib.crc32(kind.encode())))
    counts = {"faster": 0, "slower": 0, "same": 0, "undecided": 0}
    pairs = 0
    for number in range(comparisons):
        noise = NOISE[kind](rng, 2 * max_pairs)
        comparison = Comparison(max_pairs, MARGIN, seed=0)
        for pair in range(max_pairs):
            speeds = [0.0, 0.0]
            for turn, arm in enumerate(pair_order(seed + number, pair)):
                gain = math.log1p(effect) if arm == 0 else 0.0
                speeds[arm] = math.exp(noise[2 * pair + turn] + gain)
            if comparison.add(speeds[0], speeds[1]):
                break
        counts[comparison.decision().verdict] += 1
        pairs += len(comparison.first)
    return Rates(
        *(counts[name] / comparisons for name in ("faster", "slower", "same")), pairs / comparisons
    )


def final(kind: str, effect: float, comparisons: int, seed: int, num_pairs: int) -> Rates:
    """A study's final comparison: ABBA, judged beyond the noise floor of its own A/A pair."""
    rng = np.random.default_rng((seed, 1, zlib.crc32(kind.encode())))
    counts = {"faster": 0, "slower": 0, "same": 0, "undecided": 0}
    for number in range(comparisons):
        noise = NOISE[kind](rng, 4 * num_pairs)
        aa = _abba(noise[: 2 * num_pairs], 0.0)
        floor = paired_ratio(*aa, seed=number)
        rel_floor = max(abs(math.log(floor.low)), abs(math.log(floor.high)))
        arms = _abba(noise[2 * num_pairs :], effect)
        counts[paired_ratio(*arms, seed=number).verdict(rel_floor)] += 1
    return Rates(
        *(counts[name] / comparisons for name in ("faster", "slower", "same")), float(num_pairs)
    )


def repeated_t_test(kind: str, comparisons: int, max_pairs: int, seed: int) -> float:
    """What the sequential test replaces: a paired t-test at 5 % after every second pair."""
    rng = np.random.default_rng((seed, 2, zlib.crc32(kind.encode())))
    false = 0
    for _ in range(comparisons):
        first, second = _abba(NOISE[kind](rng, 2 * max_pairs), 0.0)
        logs = np.log(first), np.log(second)
        false += any(
            ttest_rel(logs[0][:n], logs[1][:n]).pvalue < 0.05 for n in range(6, max_pairs + 1, 2)
        )
    return false / comparisons


def _abba(noise: Array, effect: float) -> tuple[list[float], list[float]]:
    speeds = np.exp(noise.reshape(-1, 2))
    first, second = speeds[:, 0].copy(), speeds[:, 1].copy()
    # every other pair runs B first
    first[1::2], second[1::2] = speeds[1::2, 1], speeds[1::2, 0]
    return (first * (1 + effect)).tolist(), second.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--max-pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind in NOISE:
        null = sequential(kind, 0.0, options.comparisons, options.max_pairs, options.seed)
        row = {
            "noise": kind,
            "false": null.different,
            "same": null.same,
            "pairs": null.mean_pairs,
            "final_false_6": final(
                kind, 0.0, options.comparisons, options.seed, FINAL_PAIRS
            ).different,
            "final_false_4": final(kind, 0.0, options.comparisons, options.seed, 4).different,
            "t_test_false": repeated_t_test(
                kind, options.comparisons, options.max_pairs, options.seed
            ),
        }
        for effect in EFFECTS:
            found = sequential(
                kind, effect, options.comparisons, options.max_pairs, options.seed + 1
            )
            row[f"power_{effect}"], row[f"pairs_{effect}"] = found.faster, found.mean_pairs
            row[f"final_power_{effect}"] = final(
                kind, effect, options.comparisons, options.seed + 1, FINAL_PAIRS
            ).faster
        rows.append(row)
        if not options.json:
            _print(row, header=len(rows) == 1)
    if options.json:
        print(json.dumps({"comparisons": options.comparisons, "rows": rows}, indent=2))


def _print(row: Mapping[str, object], *, header: bool) -> None:
    columns = (
        ("noise", "noise", "<18"),
        ("false", "compare: false %", ">17"),
        ("power_0.02", "found 2 % %", ">12"),
        ("pairs_0.02", "pairs", ">6"),
        ("power_0.05", "found 5 % %", ">12"),
        ("pairs_0.05", "pairs", ">6"),
        ("final_false_6", "study: false %", ">15"),
        ("final_power_0.05", "found 5 % %", ">12"),
        ("final_false_4", "false %, 4 pairs", ">17"),
        ("t_test_false", "repeated t-test: false %", ">25"),
    )
    if header:
        print("".join(f"{title:{form}}" for _, title, form in columns))
    cells = []
    for key, _, form in columns:
        value = row[key]
        if key == "noise":
            cells.append(f"{value:{form}}")
        else:
            assert isinstance(value, float)
            shown = f"{value:.1f}" if key.startswith("pairs") else f"{100 * value:.1f}"
            cells.append(f"{shown:{form}}")
    print("".join(cells), flush=True)


if __name__ == "__main__":
    main()
