"""What each difference is predicted to be worth: tokens/s of B over A, with an interval.

The model prices settings and load. Clocks and links get a bound (at most this much). Code,
packages and drivers have no price: unknown, never zero.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autotune.diff.differences import OWNED, TREE, Difference
from autotune.diff.run import Run
from autotune.explain.gain import gains, step_ratio
from model.collectives import CollectiveKey, Route
from model.many import DELTA, probes
from model.nccl.settings import NcclSettings
from model.observations import AcceptLength
from model.predictor import Predictor
from model.spec import KNOB_FIELDS, Interval, Knobs, Scalar, Workload

Kind = Literal["predicted", "none", "at most", "unknown"]

_ONE = Interval(1.0, 1.0, 1.0)
_FIRST_NUMBER = re.compile(r"([\d.]+)")
_PCIE = re.compile(r"gen (\d+) x(\d+)")
_Z90 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """One difference (or the parts of one decision) and its predicted worth."""

    differences: tuple[Difference, ...]
    kind: Kind
    #: tokens/s of B over A from this alone; None when unknown
    ratio: Interval | None
    #: change of the cycle from this alone, ms
    cycle_change_ms: Interval | None
    reason: str

    @property
    def title(self) -> str:
        """Name of what differs."""
        first = self.differences[0]
        return "draft tree" if len(self.differences) > 1 else first.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What prices the differences of two runs."""

    predictor: Predictor
    knobs_a: Knobs
    knobs_b: Knobs
    workload_a: Workload
    workload_b: Workload
    #: settings that one side does not tell and that were taken as on the other
    assumed: tuple[str, ...]


def price(found: Sequence[Difference], model: Model | None, why_none: str) -> tuple[Worth, ...]:
    """The worth of each difference; ``why_none``: why there is no model."""
    worths: list[Worth] = []
    # turning speculation on or off brings or takes the phases, and the graphs, that go with it
    switched = any(d.key == "speculation.method" for d in found)
    tree = tuple(
        d for d in found if d.key in TREE or (switched and d.key.startswith("cuda_graph."))
    )
    rest = [d for d in found if d not in tree]
    if tree:
        worths.append(_settings(tree, model, why_none))
    for difference in rest:
        if difference.key in KNOB_FIELDS:
            worths.append(_settings((difference,), model, why_none))
        elif difference.group == "workload":
            worths.append(_load(difference, model, why_none))
        elif difference.key in OWNED or difference.key.startswith("NCCL_"):
            worths.append(_variable(difference, model, why_none))
        elif difference.key in ("clock_mhz", "pcie"):
            worths.append(_hardware(difference, model, why_none))
        else:
            worths.append(_unknown((difference,), _no_price(difference)))
    return tuple(worths)


def joint(model: Model) -> tuple[Interval, Interval]:
    """(tokens/s, cycle) of B over A from all settings and load together."""
    return step_ratio(
        model.predictor,
        (model.knobs_a, model.workload_a),
        (model.knobs_b, model.workload_b),
    )


def _settings(parts: tuple[Difference, ...], model: Model | None, why_none: str) -> Worth:
    if model is None:
        return _unknown(parts, why_none)
    target = model.knobs_b.values()
    names = TREE if len(parts) > 1 or parts[0].key in TREE else (parts[0].key,)
    changed = {**model.knobs_a.values(), **{n: target[n] for n in names}}
    if "speculation.method" in names:
        # phases that appear with speculation come with B's graphs
        changed |= {n: target[n] for n in target if n.startswith("cuda_graph.")}
    try:
        other = Knobs.of(changed)
    except ValueError as error:
        return _unknown(parts, f"it makes no sense alone: {error}")
    problem = model.predictor.step.collectives.problem(CollectiveKey.of(other))
    if problem is not None:
        return _unknown(parts, f"the model can't run it: {problem}")
    (gain,) = gains(model.predictor, model.knobs_a, [other], model.workload_a)
    if gain.same:
        reasons = {
            item.knob: item.reason
            for knobs in (other, model.knobs_a)
            for item in model.predictor.inert(knobs, model.workload_a)
        }
        reason = reasons.get(parts[0].key, "no term of the model changes")
        return Worth(
            differences=parts,
            kind="none",
            ratio=_ONE,
            cycle_change_ms=Interval(0.0, 0.0, 0.0),
            reason=f"inert here: {reason}",
        )
    return Worth(
        differences=parts,
        kind="predicted",
        ratio=gain.ratio,
        cycle_change_ms=gain.cycle_change_ms,
        reason="changed alone on A",
    )


def _load(difference: Difference, model: Model | None, why_none: str) -> Worth:
    key = difference.key
    if key in ("input_len", "output_len") and model is not None:
        context_b = model.workload_b.context
        moved = replace(model.workload_a, context=context_b)
        ratio, _ = step_ratio(
            model.predictor, (model.knobs_a, model.workload_a), (model.knobs_a, moved)
        )
        return Worth(
            differences=(difference,),
            kind="predicted",
            ratio=ratio,
            cycle_change_ms=None,
            reason=f"mean context {model.workload_a.context} → {context_b} tokens",
        )
    if key in ("seed", "chat_template", "prompts", "prompts_sha256", "temperature", "ignore_eos"):
        if model is not None and model.knobs_a.method == model.knobs_b.method == "off":
            return _unknown((difference,), "other text routes to other experts")
        return _unknown((difference,), "other text is accepted differently")
    return _unknown((difference,), why_none if model is None else "the model has no term for it")


def _variable(difference: Difference, model: Model | None, why_none: str) -> Worth:
    """An NCCL variable of the environment, priced through NCCL's choice and the paths it uses."""
    if model is None:
        return _unknown((difference,), why_none)
    if model.knobs_a.tp < 2 or model.predictor.machine.gpu is None:
        return _none(difference, "NCCL carries no all-reduce here")
    environments = []
    for value in (difference.a, difference.b):
        if value.startswith("rank "):
            return _unknown((difference,), "ranks differ among themselves")
        base = NcclSettings.from_knobs(model.knobs_a).to_env()
        base.pop(difference.key, None)
        environments.append(base if value == "unset" else {**base, difference.key: value})
    try:
        settings = [NcclSettings.from_env(environment) for environment in environments]
    except ValueError as error:
        return _unknown((difference,), str(error))
    if settings[0] == settings[1]:
        return _unknown((difference,), "the model does not read this variable")
    return _allreduce(difference, model, settings)


def _allreduce(difference: Difference, model: Model, settings: Sequence[NcclSettings]) -> Worth:
    predictor, knobs, load = model.predictor, model.knobs_a, model.workload_a
    tokens = load.concurrency * (knobs.draft_tokens if knobs.method != "off" else 1)
    size = tokens * predictor.target.allreduce_bytes_per_token
    constants = probes(predictor.calibration)
    routes = [Route("nccl", knobs.tp, one) for one in settings]
    try:
        times_D2 = predictor.step.collectives.observed_us(
            routes, [size, size], [True, True], constants
        )
    except ValueError as error:
        return _unknown((difference,), str(error))
    count = predictor.target.allreduces_per_forward
    scale = predictor.calibration["allreduce_factor"] * count / 1e3
    change_D = (times_D2[:, 1] - times_D2[:, 0]) * scale
    if abs(change_D[0]) < 1e-9:
        return _none(difference, f"NCCL runs the same all-reduce at {size} B either way")
    gradient = (change_D[1:] - change_D[0]) / DELTA
    sd = float(np.sqrt(max(gradient @ predictor.calibration.covariance @ gradient, 0.0)))
    middle = float(change_D[0])
    cycle = predictor.predict(knobs, load).cycle_ms.median
    change = Interval(middle, middle - _Z90 * sd, middle + _Z90 * sd)
    ratios = [cycle / max(cycle + part, 0.05 * cycle) for part in (change.high, change.low)]
    return Worth(
        differences=(difference,),
        kind="predicted",
        ratio=Interval(cycle / max(cycle + middle, 0.05 * cycle), min(ratios), max(ratios)),
        cycle_change_ms=change,
        reason=f"{count} all-reduces of {size} B a forward",
    )


def _hardware(difference: Difference, model: Model | None, why_none: str) -> Worth:
    if difference.key == "clock_mhz":
        values = [_FIRST_NUMBER.match(text) for text in (difference.a, difference.b)]
        if all(values):
            first, second = (float(m[1]) for m in values if m is not None)
            return _at_most(difference, second / first, "if every kernel followed the clock")
    rates = [_PCIE.search(text) for text in (difference.a, difference.b)]
    if difference.key == "pcie" and all(rates) and model is not None:
        first, second = (2 ** int(m[1]) * int(m[2]) for m in rates if m is not None)
        prediction = model.predictor.predict(model.knobs_a, model.workload_a)
        reduce_ms = sum(
            v.median for name, v in prediction.terms_ms.items() if name.endswith(".allreduce")
        )
        cycle = prediction.cycle_ms.median
        slower = cycle + reduce_ms * (first / second - 1)
        return _at_most(
            difference, cycle / max(slower, 0.05 * cycle), "if all-reduce followed the link rate"
        )
    return _unknown((difference,), why_none if model is None else "no term of the model reads it")


def _at_most(difference: Difference, ratio: float, reason: str) -> Worth:
    low, high = sorted((1.0, ratio))
    return Worth(
        differences=(difference,),
        kind="at most",
        ratio=Interval((low + high) / 2, low, high),
        cycle_change_ms=None,
        reason=reason,
    )


def _none(difference: Difference, reason: str) -> Worth:
    return Worth(
        differences=(difference,),
        kind="none",
        ratio=_ONE,
        cycle_change_ms=Interval(0.0, 0.0, 0.0),
        reason=reason,
    )


def _unknown(parts: tuple[Difference, ...], reason: str) -> Worth:
    return Worth(differences=parts, kind="unknown", ratio=None, cycle_change_ms=None, reason=reason)


def _no_price(difference: Difference) -> str:
    return {
        "code": "other code may do anything: only measuring tells",
        "packages": "another version may run other kernels: only measuring tells",
        "driver": "only measuring tells",
        "hardware state": "the model reads machines, not moments",
        "environment": "the model reads NCCL's variables only",
        "configuration": "the model has no term for it",
        "workload": "the model has no term for it",
    }[difference.group]


def model_of(
    a: Run,
    b: Run,
    predictor: Predictor | None,
    concurrency: int | None,
    defaults: Mapping[str, Scalar | None],
) -> tuple[Model | None, str]:
    """The model of two runs, or why there is none. ``defaults``: knobs that neither side tells."""
    source = a.context or b.context
    # a study's own model knows its host best
    predictor = predictor if source is None else source.predictor
    if predictor is None:
        return None, "no model: give --machine and --target"
    knobs_a = a.full_knobs({**defaults, **b.knobs, **a.knobs})
    knobs_b = b.full_knobs({**defaults, **a.knobs, **b.knobs})
    if knobs_a is None or knobs_b is None:
        side = "A" if knobs_a is None else "B"
        return None, f"the settings of {side} are not known well enough to predict"
    for side, knobs in (("A", knobs_a), ("B", knobs_b)):
        problem = predictor.target.head_problem(knobs.tp) or predictor.step.collectives.problem(
            CollectiveKey.of(knobs)
        )
        if knobs.method != "off" and predictor.draft is None:
            problem = "no draft model is known"
        if problem is not None:
            return None, f"the model can't run {side}: {problem}"
    assumed = _assumed(a, knobs_a) | _assumed(b, knobs_b)
    if source is None:
        predictor = _with_lengths(predictor, ((a, knobs_a), (b, knobs_b)), concurrency)
    loads = [_workload(run, other, concurrency) for run, other in ((a, b), (b, a))]
    return (
        Model(
            predictor=predictor,
            knobs_a=knobs_a,
            knobs_b=knobs_b,
            workload_a=loads[0],
            workload_b=loads[1],
            assumed=tuple(sorted(assumed)),
        ),
        "",
    )


def _assumed(run: Run, knobs: Knobs) -> set[str]:
    """Settings that matter to these knobs and that their run does not tell."""
    speculative = knobs.method != "off"
    names = {"parallel.tp", "speculation.method"}
    names |= {"cuda_graph.verify", *TREE} if speculative else {"cuda_graph.decode"}
    if knobs.tp > 1:
        names.add("collectives.backend")
    return {name for name in names if name not in run.knobs}


def _with_lengths(
    predictor: Predictor, sides: Sequence[tuple[Run, Knobs]], concurrency: int | None
) -> Predictor:
    """The model with the accept lengths that foreign runs measured: only step times are open."""
    seen = []
    for run, knobs in sides:
        series = run.at(concurrency) or (run.series[0] if run.series else None)
        if knobs.method == "off" or series is None or not series.accept_length:
            continue
        length = float(np.median(series.accept_length))
        if 1.0 < length < knobs.steps + 1:
            seen.append(
                AcceptLength(
                    steps=knobs.steps,
                    topk=knobs.topk,
                    draft_tokens=knobs.draft_tokens,
                    accept_length=length,
                    rel_sd=0.02,
                )
            )
    if not seen:
        return predictor
    return replace(predictor, acceptance=predictor.acceptance.update(seen))


def _workload(run: Run, other: Run, concurrency: int | None) -> Workload:
    """Load of a run, with what it does not tell taken from the other."""
    base = run.full_workload or other.full_workload
    told = {**other.workload, **run.workload}
    input_len = int(told.get("input_len") or (base.input_len if base else 1000))
    output_len = int(told.get("output_len") or (base.output_len if base else 256))
    return Workload(
        prompts=str(told.get("prompts") or (base.prompts if base else "unknown")),
        prompts_sha256=base.prompts_sha256 if base else "",
        chat_template=base.chat_template if base else None,
        input_len=input_len,
        output_len=output_len,
        context=input_len + output_len // 2,
        temperature=float(told.get("temperature") or 0.0),
        ignore_eos=base.ignore_eos if base else True,
        seed=base.seed if base else 0,
        concurrency=concurrency or (base.concurrency if base else 1),
    )
