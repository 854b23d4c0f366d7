"""From the measured difference and the predicted worths to one verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.diff.differences import Gap
from autotune.diff.measured import Measured
from autotune.diff.run import Run
from autotune.diff.worth import Worth
from model.spec import Interval

Kind = Literal[
    "within noise",
    "two modes of one configuration",
    "explained",
    "possibly explained",
    "partly explained",
    "not explained by what the model can price",
    "not explained by anything recorded",
    "not comparable",
]

#: launch-bound steps run this much slower in some runs (2 x H200: 18 or 29 ms, nothing changed)
_MODES = (1.25, 2.0)
#: a difference is named as a reason when it makes this share of the explained part
_NAMED = 0.15
#: two starts of one configuration commonly differ by this much, where no A/A pair was measured
_START_TO_START = 0.02
_FLOOR_TEXT = f"{100 * _START_TO_START:.0f} %"
#: a priced difference below this (in log speed) is none
_SMALL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of a diff."""

    kind: Kind
    #: one or two sentences
    text: str
    #: what makes the next diff conclusive, one line each
    record_next: tuple[str, ...]


def judge(
    a: Run,
    b: Run,
    found: Measured | None,
    why_none: str,
    worths: Sequence[Worth],
    together: Interval | None,
    missing: Sequence[Gap],
    odd: str = "",
) -> Verdict:
    """The verdict on two runs. ``odd``: the side whose step the model does not expect."""
    if found is None:
        return Verdict(
            kind="not comparable",
            text=f"Not comparable: {why_none}.",
            record_next=_next(a, b, missing),
        )
    ratio, floor = found.faster, _START_TO_START if found.noise_floor is None else found.noise_floor
    size = f"B is {_change(ratio.median)} against A ({_change(ratio.low)}…{_change(ratio.high)})"
    if ratio.num_pairs < 2:
        lone = "one number on a side has no noise: repeat it before explaining it"
        if abs(math.log(ratio.median)) <= max(floor, _START_TO_START):
            return Verdict(
                kind="within noise",
                text=f"Within noise: the two numbers differ by {_change(ratio.median)}, no more "
                f"than {_usual(found)}.",
                record_next=(lone,),
            )
        start = f"B is {_change(ratio.median)} against A (no interval: {lone})."
        explained = _explained(ratio.median, ratio.median, ratio.median, worths, together)
        if explained is not None:
            return Verdict(
                kind=explained[0],
                text=_join(start, explained[1], odd),
                record_next=(lone, *_next(a, b, missing)),
            )
        return Verdict(
            kind=_unexplained_kind(worths),
            text=_join(start, _unexplained(worths, together), odd),
            record_next=(lone, *_next(a, b, missing)),
        )
    if ratio.low <= 1 + floor and ratio.high >= 1 - floor:
        return _within(found, floor)
    modes = _modes(a, b, found, worths)
    if modes is not None:
        return Verdict(
            kind="two modes of one configuration",
            text=f"Two modes of one configuration: {size}. {modes}",
            record_next=(
                "repeat both interleaved, several server starts each (`autotune compare`)",
                "capture the forward in CUDA graphs: graphed steps have one mode",
            ),
        )
    explained = _explained(ratio.median, ratio.low, ratio.high, worths, together)
    if explained is not None:
        kind, text = explained
        more = () if kind == "explained" else _next(a, b, missing)
        return Verdict(kind=kind, text=_join(f"{size}.", text, odd), record_next=more)
    return Verdict(
        kind=_unexplained_kind(worths),
        text=_join(f"{size}.", _unexplained(worths, together), odd),
        record_next=_next(a, b, missing),
    )


def _usual(found: Measured) -> str:
    """What two measurements of one configuration differ by."""
    if found.noise_floor is not None and found.noise_floor > _START_TO_START:
        return f"the A/A difference of the study ({100 * found.noise_floor:.1f} %)"
    return f"two starts of one configuration commonly do ({_FLOOR_TEXT})"


def _join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def _within(found: Measured, floor: float) -> Verdict:
    ratio = found.faster
    reach = max(abs(math.log(max(ratio.low, 1e-9))), abs(math.log(ratio.high)))
    text = (
        f"Within noise: B is {_change(ratio.median)} against A "
        f"({_change(ratio.low)}…{_change(ratio.high)})"
    )
    if found.noise_floor is not None:
        text += f", the A/A difference of the study is {100 * floor:.1f} %"
    elif ratio.low > 1 or ratio.high < 1:
        text += (
            ", beyond the repeats' own spread, but two starts of one configuration commonly "
            f"differ by {100 * floor:.0f} %"
        )
    text += "."
    text += _step_alone(found, floor)
    more: tuple[str, ...] = ()
    if reach > 0.05:
        text += f" The data cannot tell differences below {100 * math.expm1(reach):.0f} %."
        more = ("more repeats of both, interleaved (`autotune compare`)",)
    flagged = [s for s, one in (("A", found.a), ("B", found.b)) if one.bimodal]
    if flagged:
        text += f" The repeats of {' and '.join(flagged)} fall into two groups: two modes."
    return Verdict(kind="within noise", text=text, record_next=more)


def _step_alone(found: Measured, floor: float) -> str:
    """A step that changed although the speed did not show it: acceptance is the noisier part."""
    step = found.step
    if step is None or found.accept is None or step.num_pairs < 2:
        return ""
    if step.low <= 1 + floor and step.high >= 1 - floor:
        return ""
    slower = "longer" if step.median < 1 else "shorter"
    return (
        f" The step alone is {slower} ({_change(step.median)} in speed, {_change(step.low)}…"
        f"{_change(step.high)}): the accept length hides it."
    )


def _modes(a: Run, b: Run, found: Measured, worths: Sequence[Worth]) -> str | None:
    """Why two runs of one configuration may differ: eager steps have a fast and a slow mode."""
    configured = [
        w
        for w in worths
        if any(d.group in ("configuration", "workload", "environment") for d in w.differences)
        and not (
            w.ratio is not None
            and max(abs(math.log(w.ratio.low)), abs(math.log(w.ratio.high))) < _SMALL
        )
    ]
    if configured:
        return None
    if found.a.bimodal or found.b.bimodal:
        side = "A" if found.a.bimodal else "B"
        return f"The settings are the same, and the repeats of {side} alone fall into two groups."
    if a.eager is False or b.eager is False or a.eager is None or b.eager is None:
        return None
    step = found.step.median if found.step is not None else found.faster.median
    factor = max(step, 1 / step)
    if not _MODES[0] <= factor <= _MODES[1]:
        return None
    return (
        f"The settings are the same and the forward runs without a CUDA graph: launch-bound steps "
        f"have a fast and a slow mode {_MODES[0]}–{_MODES[1]} × apart, and this is {factor:.2f} ×."
    )


def _explained(
    median: float,
    low: float,
    high: float,
    worths: Sequence[Worth],
    together: Interval | None,
) -> tuple[Kind, str] | None:
    """("explained" or "partly explained", sentence), or None."""
    priced = [w for w in worths if w.ratio is not None and w.kind in ("predicted", "at most")]
    if not priced:
        return None
    total = _total(priced, together)
    seen, expected = math.log(median), math.log(total.median)
    reach = (math.log(max(total.low, 1e-9)), math.log(total.high))
    overlap = math.log(max(low, 1e-9)) <= reach[1] and math.log(high) >= reach[0]
    predicted = f"{_change(total.median)} ({_change(total.low)}…{_change(total.high)})"
    others = [w.title for w in worths if w.kind == "unknown"]
    rest = f" Of unknown worth besides: {_some(others)}." if others else ""
    same_way = seen * expected > 0 and abs(expected) >= _SMALL
    sure = reach[0] > 0 or reach[1] < 0
    names = _reasons(priced, seen)
    if same_way and sure and names:
        if overlap and abs(expected) > 0.3 * abs(seen):
            return "explained", f"Explained by {names}: predicted {predicted} together.{rest}"
        if abs(expected) > 0.15 * abs(seen):
            left = math.exp(seen - expected)
            text = f"Partly explained by {names}: predicted {predicted}; {_change(left)} is left."
            return "partly explained", text + rest
    able = [w.title for w in priced if w.ratio is not None and _reaches(w.ratio, seen)]
    if overlap and not sure and able:
        return (
            "possibly explained",
            f"Possibly explained by {_some(able)}: predicted {predicted} together, too uncertain "
            f"to prove it (a calibration on this host narrows it).{rest}",
        )
    return None


def _reaches(ratio: Interval, seen: float) -> bool:
    """Whether a predicted interval reaches half of what is seen."""
    edge = math.log(max(ratio.low, 1e-9)) if seen < 0 else math.log(ratio.high)
    return edge * seen > 0 and abs(edge) >= 0.5 * abs(seen)


def _total(priced: Sequence[Worth], together: Interval | None) -> Interval:
    """All priced differences together; bounds and NCCL variables multiply."""
    settings = together or Interval(1.0, 1.0, 1.0)
    logs = [math.log(settings.median), math.log(settings.low), math.log(settings.high)]
    for worth in priced:
        joint_has_it = together is not None and all(
            d.group in ("configuration", "workload") for d in worth.differences
        )
        if worth.ratio is not None and not joint_has_it:
            for i, part in enumerate((worth.ratio.median, worth.ratio.low, worth.ratio.high)):
                logs[i] += math.log(max(part, 1e-9))
    return Interval(*(math.exp(value) for value in logs))


def _reasons(priced: Sequence[Worth], seen: float) -> str:
    pull = {
        w.title: math.log(w.ratio.median)
        for w in priced
        if w.ratio is not None and math.log(w.ratio.median) * seen > 0
    }
    total = sum(abs(v) for v in pull.values())
    named = [
        f"{title} ({_change(math.exp(v))})"
        for title, v in sorted(pull.items(), key=lambda item: -abs(item[1]))
        if total and abs(v) >= _NAMED * total
    ]
    return ", ".join(named)


def _unexplained_kind(worths: Sequence[Worth]) -> Kind:
    if any(w.kind == "unknown" for w in worths):
        return "not explained by what the model can price"
    return "not explained by anything recorded"


def _unexplained(worths: Sequence[Worth], together: Interval | None) -> str:
    unknown = [w.title for w in worths if w.kind == "unknown"]
    priced = ""
    if together is not None and abs(math.log(together.median)) >= _SMALL:
        priced = (
            f" The settings that differ are predicted to give {_change(together.median)} "
            f"({_change(together.low)}…{_change(together.high)}), which does not fit."
        )
    if unknown:
        return (
            f"Not explained by what the model can price; differing, of unknown worth: "
            f"{_some(unknown)}.{priced}"
        )
    if worths:
        return f"Not explained by anything recorded: what differs cannot do this.{priced}"
    return "Not explained by anything recorded: nothing that is known on both sides differs."


def _some(names: Sequence[str], count: int = 6) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - count} more" if len(unique) > count else ""
    return ", ".join(unique[:count]) + more


#: what closes a gap, by group
_CLOSE = {
    "code": "the commit and whether the tree was dirty (a patched server: its hash)",
    "packages": "package versions (`pip freeze` of the server's environment)",
    "driver": "the driver version (nvidia-smi)",
    "hardware state": "clocks, throttle reasons, PCIe generation and width during the run",
    "environment": (
        "the environment inside every worker and NCCL's log "
        "(NCCL_DEBUG_FILE with %h.%p, NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING)"
    ),
    "configuration": "the server's resolved arguments (its first log lines, or /server_info)",
    "workload": "prompts, lengths, temperature and concurrency of the load",
}


def _next(a: Run, b: Run, missing: Sequence[Gap]) -> tuple[str, ...]:
    found = []
    sides: dict[str, list[str]] = {}
    for gap in missing:
        # a few keys that one side prints and the other does not are no gap worth closing
        if not gap.keys or gap.group == "environment":
            sides.setdefault(gap.group, []).append(gap.side)
    for group, where in sides.items():
        side = " and ".join(dict.fromkeys(where))
        found.append(f"on {side}: {_CLOSE[group]}")
    for side, run in (("A", a), ("B", b)):
        if not any(series.terms_ms for series in run.series):
            found.append(
                f"on {side}: time per phase (draft, verify, extend), and whether the verify runs "
                f"in a CUDA graph"
            )
    return tuple(found)


def _change(ratio: float) -> str:
    if math.isinf(ratio):
        return "unbounded"
    value = 100 * (ratio - 1)
    return f"{value:+.0f} %" if abs(value) >= 99.5 else f"{value:+.1f} %"
