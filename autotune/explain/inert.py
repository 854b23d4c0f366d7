"""Knobs that cannot matter here, by the model, each with the reason and its numbers."""

from collections.abc import Mapping, Sequence

from autotune.digits import size_text
from autotune.explain.gain import gains
from autotune.explain.plans import SizePlan, message_plans
from model.predictor import Predictor
from model.spec import KNOB_FIELDS, Inert, Knobs, Scalar, Workload

#: what is tried of a knob when no study lists its values
_TYPICAL: Mapping[str, tuple[Scalar | None, ...]] = {
    "collectives.backend": ("nccl", "one_shot", "two_shot"),
    "nccl.algo": ("ring", "tree"),
    "nccl.proto": ("LL", "LL128", "Simple"),
    "nccl.min_channels": (2, 8, 16),
    "nccl.max_channels": (4, 16),
    "nccl.buffsize": (1 << 20, 16 << 20),
    "nccl.nthreads": (64, 256, 512),
    # the farthest level opens every path there is
    "nccl.p2p_level": ("SYS",),
    "host.numa_bind": (False, True),
    "cuda_graph.decode": (False, True),
    "cuda_graph.draft": (False, True),
    "cuda_graph.verify": (False, True),
    "cuda_graph.extend": (False, True),
}


def inert_knobs(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    space: Mapping[str, Sequence[Scalar | None]] | None = None,
) -> tuple[Inert, ...]:
    """Knobs none of whose values changes any term of the model from ``knobs`` on.

    ``space``: the values that count (of a study); typical ones for knobs that it does not list.
    """
    told = {item.knob: item.reason for item in predictor.inert(knobs, workload)}
    plans = message_plans(predictor, knobs, workload)
    tried: list[tuple[str, Knobs]] = []
    found: dict[str, str] = {}
    for name, typical in _TYPICAL.items():
        values = typical if space is None or name not in space else space[name]
        others = [other for value in values if (other := _with(knobs, name, value)) is not None]
        others = [other for other in others if other.id != knobs.id and _runs(predictor, other)]
        if others:
            tried += [(name, other) for other in others]
        elif name in told:
            found[name] = told[name]
        elif len(values) > 1 and (reason := _absorbed(name, knobs)) is not None:
            found[name] = reason
    moves: dict[str, bool] = {}
    for (name, _), gain in zip(
        tried, gains(predictor, knobs, [other for _, other in tried], workload), strict=True
    ):
        moves[name] = moves.get(name, False) or not gain.same
    for name, changes in moves.items():
        if not changes:
            example = next(other for tried_name, other in tried if tried_name == name)
            theirs = {item.knob: item.reason for item in predictor.inert(example, workload)}
            found[name] = (
                told.get(name) or theirs.get(name) or _reason(name, predictor, plans, knobs)
            )
    order = [name for name in KNOB_FIELDS if name in found]
    return tuple(Inert(name, found[name]) for name in order)


def _with(knobs: Knobs, name: str, value: Scalar | None) -> Knobs | None:
    try:
        return Knobs.of({**knobs.values(), name: value})
    except ValueError:
        return None


def _runs(predictor: Predictor, knobs: Knobs) -> bool:
    from model.collectives import CollectiveKey

    return predictor.step.collectives.problem(CollectiveKey.of(knobs)) is None


def _absorbed(name: str, knobs: Knobs) -> str | None:
    """Why every value of a knob gives these same knobs."""
    if name.startswith("nccl.") and knobs.collectives_backend != "nccl":
        return f"{knobs.collectives_backend} carries the all-reduce, NCCL does not"
    if name.startswith("cuda_graph.") and knobs.method == "off":
        return "speculation is off: there is no such phase to capture"
    return None


def _reason(name: str, predictor: Predictor, plans: Sequence[SizePlan], knobs: Knobs) -> str:
    if knobs.tp == 1 and (name.startswith("nccl.") or name == "collectives.backend"):
        return "one rank has nobody to reduce with"
    if name.startswith("nccl.") and plans:
        first, last = plans[0], plans[-1]
        sizes = size_text(first.size_bytes)
        if last is not first:
            low, high = sorted((first.size_bytes, last.size_bytes))
            sizes = f"{size_text(low)}–{size_text(high)}"
        kinds = " and ".join(dict.fromkeys(f"{p.algo.capitalize()}/{p.proto}" for p in plans))
        most = max(plan.channels for plan in plans)
        there = first.channels_there
        return {
            "nccl.algo": f"at {sizes} NCCL runs {kinds} already, the others do not change it",
            "nccl.proto": f"at {sizes} NCCL runs {kinds} already",
            "nccl.min_channels": (
                f"at {sizes} the message fills {most} of {there} channels, however many there are"
            ),
            "nccl.max_channels": (
                f"only a cap: {there} channels exist and {most} are used at {sizes}"
            ),
            "nccl.buffsize": f"sizes the Simple protocol only; at {sizes} NCCL runs {kinds}",
            "nccl.nthreads": (
                f"only a cap: at {sizes} NCCL uses {max(p.threads for p in plans)} threads"
            ),
            "nccl.p2p_level": "it opens no path that is not used by default",
        }[name]
    if name.startswith("cuda_graph."):
        if predictor.machine.gpu is None:
            return "there is no GPU: nothing is captured"
        return "this phase does not run here, or is not bound by its launches"
    if name == "host.numa_bind" and predictor.machine.cpu.sockets == 1:
        return "the host has one socket"
    if name == "host.numa_bind":
        return (
            "no phase is bound by its launches here, so where the host's threads run is no matter"
        )
    return "no term of the model depends on it here"
