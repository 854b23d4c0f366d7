"""Which knobs mattered in a recorded space: each against the same configurations without it.

Every other knob held equal, the ratio of two values' speeds is one pair; a knob's effect is the
median over its pairs, and the best that is left with a value says what fixing it costs. A ratio
within the repeats' own noise is none.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import chi2

from model.spec import Knobs, Scalar

#: what plain decoding never runs
_OF_SPECULATION = ("speculation.", "cuda_graph.draft", "cuda_graph.verify", "cuda_graph.extend")
#: of a ratio's standard error: beyond is an effect
_SURE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One value of a knob. Ratios are speed with it / speed with ``against``."""

    knob: str
    value: Scalar | None
    #: the best configuration with this value as a share of the best of all
    best_share: float
    #: the value that ratios are taken against (the first); None for itself
    against: Scalar | None
    num_pairs: int
    ratio: float | None
    lowest: float | None
    highest: float | None

    def matters(self, noise: float) -> bool:
        """Whether the median pair differs by more than ``noise``, a standard error of one pair."""
        return self.ratio is not None and abs(math.log(self.ratio)) > _SURE * noise


def settings_of(knobs: Knobs) -> dict[str, Scalar | None]:
    """Knobs that say something of their own: a chain's tokens follow from its steps."""
    values = dict(knobs.values())
    if knobs.method == "off":
        values = {k: v for k, v in values.items() if not k.startswith(_OF_SPECULATION)}
        values["speculation.method"] = "off"
    elif knobs.topk == 1:
        del values["speculation.draft_tokens"]
    return values


def effects(
    knobs: Mapping[str, Knobs], scores: Mapping[str, float], least_share: float = 0.0
) -> list[Effect]:
    """Every value of every knob that takes several. ``scores``: log speed by knobs id.

    ``least_share``: of the best; slower configurations are left out, whose noise says nothing of
    the ones that anybody would choose.
    """
    best = max(scores.values())
    scores = {e: score for e, score in scores.items() if math.exp(score - best) >= least_share}
    settings = {each: settings_of(knobs[each]) for each in scores}
    names = sorted({name for values in settings.values() for name in values})
    found = []
    for name in names:
        having = {
            each: values
            for each, values in settings.items()
            if name in values and not (name.startswith("nccl.") and _without_nccl(values))
        }
        listed = sorted({values[name] for values in having.values()}, key=_order)
        if len(listed) < 2:
            continue
        for value in listed:
            first = listed[0]
            ratios = [] if value == first else _ratios(having, scores, name, first, value)
            found.append(
                Effect(
                    knob=name,
                    value=value,
                    best_share=math.exp(
                        max(scores[e] for e, values in having.items() if values[name] == value)
                        - best
                    ),
                    against=None if value == first else first,
                    num_pairs=len(ratios),
                    ratio=math.exp(statistics.median(ratios)) if ratios else None,
                    lowest=math.exp(min(ratios)) if ratios else None,
                    highest=math.exp(max(ratios)) if ratios else None,
                )
            )
    return found


def _without_nccl(values: Mapping[str, Scalar | None]) -> bool:
    return values.get("collectives.backend", "nccl") not in ("nccl", "auto")


def _ratios(
    having: Mapping[str, Mapping[str, Scalar | None]],
    scores: Mapping[str, float],
    name: str,
    first: Scalar | None,
    value: Scalar | None,
) -> list[float]:
    """Log ratios of all pairs that differ in ``name`` only."""
    pairs: dict[tuple[object, ...], dict[Scalar | None, float]] = defaultdict(dict)
    for each, values in having.items():
        others = tuple(sorted((k, str(v)) for k, v in values.items() if k != name))
        pairs[others][values[name]] = scores[each]
    return [both[value] - both[first] for both in pairs.values() if {first, value} <= set(both)]


def pair_noise(repeats: Sequence[Sequence[float]]) -> float:
    """Standard error of a pair's log ratio, from the repeats (tokens/s) of all cells.

    From the median of the cells' variances, each made unbiased for its count by the median of
    chi-squared: a few cells with an outlier do not speak for all. 0 where none has two repeats.
    """
    found = [
        statistics.variance([math.log(speed) for speed in cell])
        / (float(chi2.median(len(cell) - 1)) / (len(cell) - 1))
        for cell in repeats
        if len(cell) > 1
    ]
    if not found:
        return 0.0
    count = statistics.fmean(len(cell) for cell in repeats if len(cell) > 1)
    return math.sqrt(2.0 * statistics.median(found) / count)


def _order(value: Scalar | None) -> tuple[int, float, str]:
    """Unset first, then numbers, then words."""
    if value is None or value == "auto":
        return (0, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (2, 0.0, str(value))
