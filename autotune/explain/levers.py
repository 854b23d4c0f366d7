"""What could make knobs faster: other knobs by lever, ranked by their predicted gain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autotune.explain.gain import Gain, gains
from autotune.explain.plans import settings_text
from autotune.explain.terms import TermRow
from model.acceptance import MAX_DEPTHS, MAX_RANKS
from model.collectives import CollectiveKey
from model.predictor import Predictor
from model.spec import Knobs, Scalar, Workload
from model.whatif import plain

_GRAPHS = ("cuda_graph.decode", "cuda_graph.draft", "cuda_graph.verify", "cuda_graph.extend")
_STEPS = (1, 2, 3, 4, 5, 6, 8)
_WIDTHS = (2, 4, 8)
_TOKENS = (4, 6, 8, 12, 16, 24, 32)
#: a lever below this gain is not worth a line
_WORTH = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One way to change the knobs."""

    name: str
    #: what to set, in words
    change: str
    gain: Gain
    #: measured ratio of these knobs to the subject's in the same study, and where
    measured_ratio: float | None = None
    measured_trial: int | None = None
    #: the study's space lists it; None without a study
    in_space: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The most that a term could give, whoever changes it."""

    term: str
    now_ms: float
    bound_ms: float
    bound: str
    #: tokens/s ratio if the term came down to the bound
    ratio: float
    #: what a term this far from its bound is a sign of
    hint: str


def levers(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    nccl_best: Knobs | None,
    measured: Mapping[str, tuple[int, float]],
    own_speed: float | None,
    space: Mapping[str, Sequence[Scalar | None]] | None,
) -> tuple[tuple[Lever, ...], tuple[Lever, ...]]:
    """(levers that are predicted to help, best first; those that are not, best first).

    ``measured``: knobs id -> (trial, median speed) of the same study and level.
    """
    classes = _classes(predictor, knobs, nccl_best)
    alternatives: dict[str, Knobs] = {}
    for others in classes.values():
        for other in others:
            if other.id != knobs.id and _runs(predictor, other):
                alternatives.setdefault(other.id, other)
    alternatives = _fitting(predictor, alternatives, workload)
    ids = list(alternatives)
    by_id = dict(
        zip(ids, gains(predictor, knobs, [alternatives[i] for i in ids], workload), strict=True)
    )
    found = []
    for name, others in classes.items():
        own = [by_id[other.id] for other in others if other.id in by_id]
        if own:
            best = max(own, key=lambda gain: gain.ratio.median)
            found.append(_lever(name, knobs, best, measured, own_speed, space))
    together = _together(predictor, knobs, found, workload)
    if together is not None:
        found.append(_lever("best of these together", knobs, together, measured, own_speed, space))
    found.sort(key=lambda lever: -lever.gain.ratio.median)
    better = tuple(lever for lever in found if lever.gain.ratio.median > 1.0 + _WORTH)
    rest = tuple(lever for lever in found if lever.gain.ratio.median <= 1.0 + _WORTH)
    return better, rest


def _classes(predictor: Predictor, knobs: Knobs, nccl_best: Knobs | None) -> dict[str, list[Knobs]]:
    """Lever -> the knobs that pull it."""
    found: dict[str, list[Knobs]] = {}

    def add(name: str, **values: Scalar | None) -> None:
        other = _with(knobs, {key.replace("__", "."): v for key, v in values.items()})
        if other is not None:
            found.setdefault(name, []).append(other)

    speculative = knobs.method != "off"
    if predictor.machine.gpu is not None:
        phases = ("draft", "verify", "extend") if speculative else ("decode",)
        off = [p for p in phases if not getattr(knobs, f"graph_{p}")]
        for phase in off:
            add(f"capture {phase} in a CUDA graph", **{f"cuda_graph__{phase}": True})
        if len(off) > 1:
            add("capture every phase in CUDA graphs", **{f"cuda_graph__{p}": True for p in off})
        for backend in ("nccl", "one_shot", "two_shot"):
            if backend != knobs.collectives_backend and knobs.tp > 1:
                add("other all-reduce backend", collectives__backend=backend)
        if nccl_best is not None:
            found["NCCL settings"] = [nccl_best]
    if predictor.machine.cpu.sockets > 1 and not knobs.numa_bind:
        add("bind ranks to their NUMA node", host__numa_bind=True)
    if predictor.draft is not None:
        _trees(knobs, add)
    if speculative:
        found["speculation off"] = [plain(knobs)]
    for tp in (knobs.tp // 2, knobs.tp * 2):
        if tp >= 1 and (predictor.machine.gpu is None or tp <= predictor.machine.num_gpus):
            add("other number of ranks", parallel__tp=tp)
    return found


def _trees(knobs: Knobs, add: Callable[..., None]) -> None:
    speculative = knobs.method != "off"
    graphs = {} if speculative else _graphs_as_decode(knobs)
    for steps in _STEPS:
        for topk in (1, *_WIDTHS):
            if steps > MAX_DEPTHS or topk > MAX_RANKS:
                continue
            sizes = (steps + 1,) if topk == 1 else _TOKENS
            for tokens in sizes:
                if tokens > 1 + topk + (steps - 1) * topk**2:
                    continue
                for name in _tree_levers(knobs, steps, topk, tokens):
                    add(
                        name,
                        speculation__method="eagle3",
                        speculation__steps=steps,
                        speculation__topk=topk,
                        speculation__draft_tokens=tokens,
                        **graphs,
                    )


def _tree_levers(knobs: Knobs, steps: int, topk: int, tokens: int) -> list[str]:
    """The levers that this tree belongs to, seen from the present one."""
    if knobs.method == "off":
        return ["speculation on"]
    names = []
    if topk == knobs.topk:
        if topk == 1 or tokens == knobs.draft_tokens:
            names += ["fewer draft steps"] if steps < knobs.steps else []
            names += ["more draft steps"] if steps > knobs.steps else []
        if topk > 1 and steps == knobs.steps:
            names += ["fewer draft tokens"] if tokens < knobs.draft_tokens else []
            names += ["more draft tokens"] if tokens > knobs.draft_tokens else []
    elif topk < knobs.topk:
        names.append("narrower tree")
    else:
        names.append("wider tree")
    return names


def _graphs_as_decode(knobs: Knobs) -> dict[str, Scalar]:
    return {f"cuda_graph__{phase}": knobs.graph_decode for phase in ("draft", "verify", "extend")}


def _together(
    predictor: Predictor, knobs: Knobs, found: Sequence[Lever], workload: Workload
) -> Gain | None:
    """The best combination of the levers that help, one of a kind; None if one alone is best."""
    kinds: dict[str, Lever] = {}
    for lever in sorted(found, key=lambda lever: -lever.gain.ratio.median):
        if lever.gain.ratio.median > 1.0 + _WORTH:
            kinds.setdefault(_group_of(lever.name), lever)
    if len(kinds) < 2:
        return None
    own = knobs.values()
    combined: dict[str, Knobs] = {}
    for size in range(2, len(kinds) + 1):
        for chosen in combinations(kinds.values(), size):
            values = dict(own)
            for lever in chosen:
                other = lever.gain.knobs.values()
                values |= {name: v for name, v in other.items() if own.get(name) != v}
            made = _with(knobs, values)
            if made is not None and _runs(predictor, made):
                combined[made.id] = made
    for lever in kinds.values():
        combined.pop(lever.gain.knobs.id, None)
    combined = _fitting(predictor, combined, workload)
    results = gains(predictor, knobs, list(combined.values()), workload)
    best = max(results, key=lambda gain: gain.ratio.median, default=None)
    single = max(lever.gain.ratio.median for lever in kinds.values())
    return best if best is not None and best.ratio.median > single + _WORTH else None


def _group_of(name: str) -> str:
    if "graph" in name:
        return "graphs"
    if name in ("other all-reduce backend", "NCCL settings"):
        return "communication"
    if "NUMA" in name:
        return "host"
    return "ranks" if name == "other number of ranks" else "tree"


def _lever(
    name: str,
    knobs: Knobs,
    gain: Gain,
    measured: Mapping[str, tuple[int, float]],
    own_speed: float | None,
    space: Mapping[str, Sequence[Scalar | None]] | None,
) -> Lever:
    lever = Lever(name=name, change=change_text(knobs, gain.knobs), gain=gain)
    if space is not None:
        lever = replace(lever, in_space=_in_space(knobs, gain.knobs, space))
    if gain.knobs.id in measured and own_speed:
        trial, speed = measured[gain.knobs.id]
        lever = replace(lever, measured_ratio=speed / own_speed, measured_trial=trial)
    return lever


def change_text(before: Knobs, after: Knobs) -> str:
    """What to set to get from one to the other: "steps 2 -> 4, cuda_graph.verify on"."""
    old, new = before.values(), after.values()
    if after.method != before.method and after.method == "off":
        return "speculation.method off"
    parts = []
    names = [n for n in (*new, *(n for n in old if n not in new)) if old.get(n) != new.get(n)]
    if after.method != before.method:
        parts.append(after.tree_text())
        names = [n for n in names if not n.startswith("speculation.")]
    if after.topk == 1 and before.topk == 1:
        names = [n for n in names if n != "speculation.draft_tokens"]
    if sum(n.startswith("nccl.") for n in names) > 1:
        parts.append(settings_text(after))
        names = [n for n in names if not n.startswith("nccl.")]
    for name in names:
        parts.append(f"{name} {_shown(old.get(name))} → {_shown(new.get(name))}")
    return ", ".join(parts)


def _shown(value: Scalar | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)


def _in_space(before: Knobs, after: Knobs, space: Mapping[str, Sequence[Scalar | None]]) -> bool:
    old, new = before.values(), after.values()
    for name, value in new.items():
        if old.get(name) == value or (after.method == "off" and name != "speculation.method"):
            continue
        if name == "speculation.draft_tokens" and after.topk == 1:
            continue
        if value not in [v if v != "auto" else None for v in space.get(name, ())] and (
            value not in space.get(name, ())
        ):
            return False
    return True


def headroom(
    rows: Sequence[TermRow], *, on_gpu: bool = True, count: int = 4
) -> tuple[Headroom, ...]:
    """Terms by what they could give at most: down to the prediction, or to the speed of light."""
    cycle = next((row for row in rows if row.name == "cycle"), None)
    if cycle is None:
        return ()
    total = _now(cycle)
    found = []
    for row in rows:
        now = _now(row)
        if row.unit != "ms" or row.name == "cycle" or now is None or total is None:
            continue
        if row.disagreement is not None and row.predicted is not None:
            bound = row.predicted.median
            if bound < now:
                found.append(_headroom(row.name, now, bound, "its prediction", total, row, on_gpu))
        elif row.speed_of_light is not None and row.speed_of_light < now:
            light = row.speed_of_light
            found.append(_headroom(row.name, now, light, "speed of light", total, row, on_gpu))
    found.sort(key=lambda item: -item.ratio)
    return tuple(item for item in found if item.ratio > 1.02)[:count]


def _headroom(
    term: str, now: float, bound: float, kind: str, total: float, row: TermRow, on_gpu: bool
) -> Headroom:
    rest = max(total - (now - bound), 1e-9)
    return Headroom(
        term=term,
        now_ms=now,
        bound_ms=bound,
        bound=kind,
        ratio=total / rest,
        hint=_hint(row, on_gpu),
    )


def _hint(row: TermRow, on_gpu: bool) -> str:
    """What a measured term far from its bound points to (reports in the servers reference, D)."""
    far = row.of_light is not None and row.of_light < 0.10 and row.measured is not None
    _, _, part = row.name.partition(".")
    if part == "allreduce" and row.disagreement is not None:
        return (
            "far above its prediction: ranks wait for one another (uneven load, busy cores, a slow "
            "peer), or the traffic takes another path than the machine file says"
        )
    if not far:
        return ""
    if not on_gpu:
        return (
            "waiting for the other ranks and local sockets, not bandwidth"
            if part == "allreduce"
            else "under 10 % of peak: calls of many small operators, not arithmetic"
        )
    return {
        "attention": (
            "under 10 % of peak: a kernel or launch problem (attention backend, split-KV, "
            "graph capture), not communication"
        ),
        "moe": "under 10 % of peak: kernel choice for this number of rows, or eager launches",
        "allreduce": (
            "latency, not bandwidth: fewer or faster hops (backend, P2P), not protocol settings"
        ),
        "head": "under 10 % of peak: eager launches or a gather of all logits",
    }.get(part, "under 10 % of peak: launches, not arithmetic")


def _now(row: TermRow) -> float | None:
    if row.measured is not None:
        return row.measured.median
    return None if row.predicted is None else row.predicted.median


def _with(knobs: Knobs, values: Mapping[str, Scalar | None]) -> Knobs | None:
    try:
        return Knobs.of({**knobs.values(), **values})
    except ValueError:
        return None


def _runs(predictor: Predictor, knobs: Knobs) -> bool:
    """Whether the machine and the model allow these knobs."""
    if predictor.target.head_problem(knobs.tp) is not None:
        return False
    if knobs.method != "off" and predictor.draft is None:
        return False
    return predictor.step.collectives.problem(CollectiveKey.of(knobs)) is None


def _fitting(
    predictor: Predictor, alternatives: dict[str, Knobs], workload: Workload
) -> dict[str, Knobs]:
    """Those that fit the GPUs' memory: fewer ranks hold more weights each."""
    if not alternatives:
        return {}
    many = predictor.predict_many(list(alternatives.values()), workload)
    return {
        key: knobs
        for (key, knobs), fits in zip(alternatives.items(), many.feasible, strict=True)
        if fits
    }
