"""Sentences and rows that the page and the Markdown report share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.digits import number, percent
from autotune.explain.levers import Lever
from autotune.reporting.content import Report
from autotune.statistics import Ratio
from model.spec import Interval

_SHOWN_LEVERS = 4
NOISE_HEADS = ("concurrency", "noise floor", "pairs")
HEADROOM_HEADS = ("concurrency", "part", "now, ms", "bound, ms", "would give", "a sign of")
_SHOWN_PACKAGES = ("torch", "triton", "sglang", "vllm", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPoint:
    """One trial at one level: what was predicted before it, and what was measured, tok/s."""

    trial: int
    concurrency: int
    label: str
    is_baseline: bool
    predicted: Interval
    measured: float

    @property
    def inside(self) -> bool:
        """Whether the 90 % interval holds the measurement."""
        return self.predicted.low <= self.measured <= self.predicted.high


def subtitle(report: Report) -> str:
    """What was measured, how often, and where the study stands."""
    outcome, workload = report.outcome, report.study.workload
    target = report.study.target
    name = target.shape or (target.path.name if target.path is not None else "?")
    levels = ", ".join(map(str, workload.concurrency))
    failed = f", {outcome.num_failed} failed" if outcome.num_failed else ""
    return (
        f"{name} on backend {report.study.backend.kind}; {workload.prompts}, "
        f"{workload.input_len} + {workload.output_len} tokens, concurrency {levels}; "
        f"{outcome.num_search_trials} trials{failed}, {outcome.num_repeats} repeats; "
        f"the study is {report.view.state}"
    )


def ratio_text(ratio: Ratio | None) -> str:
    """A ratio with its interval."""
    if ratio is None:
        return "–"
    return f"{ratio.median:.3f} × ({ratio.low:.3f}–{ratio.high:.3f})"


def share_text(share: float | None) -> str:
    """A share in percent."""
    return "–" if share is None else f"{100 * share:.1f} %"


def lever_gain(lever: Lever) -> str:
    """Predicted gain in percent with its interval."""
    low, middle, high = (
        100 * (value - 1)
        for value in (lever.gain.ratio.low, lever.gain.ratio.median, lever.gain.ratio.high)
    )
    return f"{middle:+.1f} ({low:+.1f}…{high:+.1f})"


def next_steps(report: Report) -> Iterator[tuple[int, Lever]]:
    """(concurrency, lever), a few for each level."""
    shown: dict[int, int] = {}
    for level, lever in report.helping:
        shown[level] = shown.get(level, 0) + 1
        if shown[level] <= _SHOWN_LEVERS:
            yield level, lever


def noise_rows(report: Report) -> list[tuple[str, str, str]]:
    """Concurrency, noise floor, pairs."""
    floors = sorted(report.noise_floors.values(), key=lambda floor: floor.concurrency)
    return [(str(f.concurrency), f"±{100 * f.rel_floor:.1f} %", str(f.num_pairs)) for f in floors]


def headroom_rows(report: Report) -> list[tuple[str, ...]]:
    """Concurrency, part, now, bound, what reaching it would give, what it is a sign of."""
    return [
        (str(level), item.term, number(item.now_ms), f"{number(item.bound_ms)} ({item.bound})",
         percent(item.ratio), item.hint)
        for level, item in report.headroom
    ]  # fmt: skip


def compared_rows(report: Report) -> list[tuple[str, str, str]]:
    """A, B and the answer of each comparison in turns, by level."""
    return [
        (str(detail.get("a")), str(detail.get("b")), str(level.get("answer")))
        for detail in report.compared
        for level in detail.get("levels") or ()
        if isinstance(level, dict)
    ]


def flagged(report: Report) -> list[str]:
    """What the repeats of baseline and best show, a line each."""
    return [
        f"concurrency {level.concurrency}, repeats of the {name}: {', '.join(summary.flags)}"
        for level in report.levels
        for name, summary in (("baseline", level.outcome.baseline), ("best", level.outcome.best))
        if summary.flags
    ]


def predicted_points(report: Report) -> list[PredictedPoint]:
    """Every trial and level that has both a stored prediction and a measurement."""
    return [
        PredictedPoint(
            trial=trial.trial.number,
            concurrency=level.concurrency,
            label=trial.trial.knobs.label(),
            is_baseline=trial.trial.role in ("baseline", "aa"),
            predicted=level.predicted.tokens_per_s,
            measured=level.tokens_per_s.median,
        )
        for trial in report.evidence.trials
        for level in trial.levels
        if level.predicted is not None and level.tokens_per_s is not None
    ]


def inside_text(points: Sequence[PredictedPoint]) -> str:
    """How many measurements their predictions held."""
    inside = sum(point.inside for point in points)
    return (
        f"{inside} of {len(points)} measurements lie inside the 90 % interval that was predicted "
        f"before the trial was measured."
    )


def num_more(report: Report) -> str | None:
    """What keeps the verdict open, if it is."""
    undecided = [lv.concurrency for lv in report.levels if lv.outcome.verdict == "undecided"]
    if not undecided:
        return None
    where = ", ".join(map(str, undecided))
    return (
        f"At concurrency {where} the answer is open: `autotune compare best baseline` takes more "
        f"pairs until it is clear."
    )


def commands(report: Report) -> list[str]:
    """The commands that lead on from here."""
    name, database = report.view.name, report.database
    best = {level.outcome.trial for level in report.levels}
    lines = [f"autotune dashboard {name} --database {database}"]
    if report.levels:
        lines = [
            f"autotune study best {name} --database {database}",
            *(f"autotune explain {trial} --study {name} --database {database}" for trial in
              sorted(best)),
            f"autotune compare best baseline --study {name} --database {database}",
            *lines,
        ]  # fmt: skip
    if report.view.state != "finished":
        lines.insert(0, f"autotune study resume {name} --database {database}")
    return lines


def provenance_rows(report: Report) -> list[tuple[str, str]]:
    """Where the numbers come from; what is not known is left out."""
    found = report.provenance
    view = report.view
    rows = [
        ("study", f"{view.name} (id {view.id}), started {view.created:%Y-%m-%d %H:%M} UTC"),
        ("study file", view.label),
        ("database", report.database),
    ]
    if found is None:
        return [*rows, ("provenance", "not stored with any of the best trials")]
    commit = found.commit or "unknown"
    packages = [f"{p} {v}" for p, v in found.packages.items() if p in _SHOWN_PACKAGES]
    pairs = (
        ("configuration hash", found.config_hash),
        ("code", commit + (" with uncommitted changes" if found.dirty else "")),
        ("python", found.python),
        ("packages", ", ".join(packages)),
        ("driver", found.driver or ""),
        ("GPUs", ", ".join(found.gpus)),
        ("PCIe", ", ".join(found.pcie)),
        ("CPU", found.cpu),
        ("machine fingerprint", found.machine_fingerprint),
        ("not known", "; ".join(f"{name}: {why}" for name, why in found.unknown.items())),
    )
    rows += [(name, value) for name, value in pairs if value]
    return [*rows, ("written by", f"autotune study report {view.name}")]
