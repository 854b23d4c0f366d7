"""Judges settings by NCCL's own logs: did they arrive, and do they change what NCCL does?

A variable is *not effective* when a worker did not read it (or read another value); *inert* when
without it NCCL would run the very same kernels at every size; *effective* otherwise, with what it
does by size. Everything that the log cannot tell is *unknown*, with the way to find out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from autotune.effect.absence import Absence, absent, denied, level_off
from autotune.effect.by_size import Scene, SizeEffect
from autotune.effect.inert import inert_reason
from autotune.effect.nccl_variables import nearest
from autotune.effect.notes import notes, nothing_in
from autotune.effect.ranges import sizes_in_words
from autotune.effect.reads import SILENT, Reads, environment_read, reads_of
from autotune.effect.silent import unprinted
from autotune.effect.stages import Stage, stages_of
from autotune.effect.suggest import suggestions
from autotune.effect.verdicts import CommSummary, Judgement, KnobVerdict, Suggestion
from autotune.nccl_log_types import NcclLog
from model.machine import Machine
from model.nccl.settings import NcclSettings

#: variables whose effect on an all-reduce the selector knows
MODELLED = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_LL128_NTHREADS",
    "NCCL_THREAD_THRESHOLDS", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
    "NCCL_NVLS_ENABLE",
)  # fmt: skip
#: what describes or restricts the host rather than tunes it
_HOST = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE")


def judge_log(
    log: NcclLog,
    expected: Mapping[str, str] | None = None,
    *,
    machine: Machine | None = None,
    sizes: Sequence[int] = (),
) -> Judgement:
    """Judge ``expected`` variables and every one that NCCL read.

    ``sizes`` (bytes) replace those that the log shows.
    """
    asked = dict(expected or {})
    stages = tuple(stages_of(log, machine, tuple(sizes)))
    names = list(asked) + [name for name in environment_read(log) if name not in asked]
    knobs = tuple(_judge(log, stages, name, asked) for name in names)
    tuned = [name for name in names if name in MODELLED and (name in asked or name not in _HOST)]
    together: tuple[SizeEffect, ...] = ()
    offers: tuple[Suggestion, ...] = ()
    main = next((stage for stage in stages if isinstance(stage.scene, Scene)), None)
    if main is not None and isinstance(main.scene, Scene):
        present = [name for name in tuned if name in main.environment]
        if len(present) > 1:
            together = _together(main, present)
        offers = suggestions(main.scene, main.environment, main.sizes, _HOST)
    return Judgement(
        files=log.files,
        num_lines=log.num_lines,
        versions=log.versions,
        comms=tuple(_summary(stage) for stage in stages),
        knobs=knobs,
        together=together,
        suggestions=offers,
        notes=tuple(notes(log, stages)),
    )


def _judge(
    log: NcclLog, stages: Sequence[Stage], name: str, expected: Mapping[str, str]
) -> KnobVerdict:
    asked = expected.get(name)
    reads = reads_of(log, name)
    common = {"name": name, "asked": asked, "read": reads.value, "evidence": reads.evidence}

    def verdict(kind: str, reason: str, **more: object) -> KnobVerdict:
        return KnobVerdict(**{**common, "verdict": kind, "reason": reason, **more})  # type: ignore[arg-type]

    if not name.startswith("NCCL_"):
        near = nearest(name) if name.upper().startswith("NCCL_") else None
        if near is not None:
            return verdict(
                "not effective", f"NCCL reads no {name}: did you mean {near}?",
                lost_at="not a variable of NCCL",
            )  # fmt: skip
        return verdict(
            "unknown", "not NCCL's, so its log does not show it: read the workers' environment "
            "(`-- CMD --run`)",
        )  # fmt: skip
    problem = _problem(log, name, asked, reads)
    if problem is not None:
        return verdict(
            problem.verdict, problem.reason, lost_at=problem.lost_at,
            **({} if problem.evidence is None else {"evidence": problem.evidence}),
        )  # fmt: skip
    bypassed = _bypassed(stages, name)
    if bypassed is not None:
        return verdict("inert", bypassed[0], evidence=bypassed[1])
    if name not in MODELLED:
        return verdict("unknown", "read by NCCL; what it does to an all-reduce is not modelled")
    return _matters(stages, name, verdict)


def _problem(log: NcclLog, name: str, asked: str | None, reads: Reads) -> Absence | None:
    """What decides without a look at what NCCL chooses, or None."""
    if name in SILENT and not reads.found:
        return unprinted(log, name, asked)
    if not log.processes:
        return Absence(verdict="unknown", reason=nothing_in(log))
    off = level_off(log, environment_read(log), reads)
    if off is not None:
        return off
    if asked is not None:
        problem = absent(log, name, asked)
        if problem is not None:
            if problem.verdict != "unknown":
                return problem
            # what ran may contradict a value even where nothing says that it arrived
            return denied(log, name, asked) or problem
    return denied(log, name)


#: what a symmetric-memory kernel does not read
_BYPASSED = frozenset({"NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_LL128_NTHREADS",
                       "NCCL_BUFFSIZE", "NCCL_THREAD_THRESHOLDS"})  # fmt: skip


def _bypassed(stages: Sequence[Stage], name: str) -> tuple[str, tuple[str, ...]] | None:
    """Why a variable reaches no logged all-reduce: all ran symmetric-memory kernels."""
    ran = [
        choice
        for stage in stages
        for choice in stage.process.choices
        if choice.function in ("AllReduce", "unknown")
    ]
    if name not in _BYPASSED or not ran or any(c.algo != "SYMMETRIC" for c in ran):
        return None
    return (
        f"all {len(ran)} logged sizes run a symmetric-memory kernel ({ran[0].proto}), which does "
        "not read it",
        (str(ran[0].evidence),),
    )


def _matters(
    stages: Sequence[Stage], name: str, verdict: Callable[..., KnobVerdict]
) -> KnobVerdict:
    """Inert or effective, by the communicators of the log."""
    if not stages:
        return verdict("unknown", "the log shows no communicator of two or more ranks")
    judged = [stage for stage in stages if isinstance(stage.scene, Scene)]
    if not judged:
        known = inert_reason(stages[0].comm, stages[0].environment, name, None, ())
        if known is not None:
            return verdict("inert", known)
        return verdict(
            "unknown", f"read, but whether it matters is not to be told: {stages[0].scene}"
        )
    try:
        effects = _distinct(effect for stage in judged for effect in _compare(stage, [name]))
    except ValueError as error:
        return verdict("unknown", f"read, but whether it matters is not to be told: {error}")
    if any(effect.outcome != "inert" for effect in effects):
        return verdict("effective", sizes_in_words(effects), sizes=tuple(effects))
    first = judged[0]
    scene = first.scene if isinstance(first.scene, Scene) else None
    known = inert_reason(first.comm, first.environment, name, scene, effects)
    if name == "NCCL_NVLS_ENABLE" and known is None:
        return verdict("unknown", "whether this host has NVLink multicast is not in the log")
    reason = known or _same_kernels(effects)
    if len(judged) < len(stages):
        reason += f" (judged for {len(judged)} of {len(stages)} communicators)"
    return verdict("inert", reason, sizes=tuple(effects))


def _distinct(effects: Iterable[SizeEffect]) -> list[SizeEffect]:
    """By size; communicators that choose alike are told once."""
    unique = {(e.size_bytes, e.outcome, e.present, e.without): e for e in effects}
    return sorted(unique.values(), key=lambda effect: effect.size_bytes)


def _compare(stage: Stage, names: Sequence[str]) -> tuple[SizeEffect, ...]:
    """The stage's settings against the same without ``names``."""
    assert isinstance(stage.scene, Scene)
    rest = {key: value for key, value in stage.environment.items() if key not in names}
    ours = NcclSettings.from_env(stage.environment)
    return stage.scene.compare(ours, NcclSettings.from_env(rest), stage.sizes)


def _together(stage: Stage, names: Sequence[str]) -> tuple[SizeEffect, ...]:
    try:
        return _compare(stage, names)
    except ValueError:
        # each variable's own verdict says what is missing
        return ()


def _same_kernels(effects: Sequence[SizeEffect]) -> str:
    kinds = list(dict.fromkeys(effect.present.split(",")[0] for effect in effects))
    return (
        f"equals NCCL's own choice at all {len(effects)} sizes ({', '.join(kinds)}, same channels "
        "and threads without it)"
    )


def _summary(stage: Stage) -> CommSummary:
    comm = stage.comm
    choices = [
        f"{choice.size_bytes} B: {choice.algo}/{choice.proto}"
        + (
            f", channels {choice.channel_low}..{choice.channel_high}"
            if choice.channel_high >= 0
            else ""
        )
        for choice in stage.process.choices
        if choice.function in ("AllReduce", "unknown")
    ]
    machine = stage.scene.machine if isinstance(stage.scene, Scene) else None
    return CommSummary(
        comm=comm.comm,
        version=stage.process.version,
        num_ranks=comm.num_ranks,
        ranks_logged=stage.process.ranks,
        channels=comm.coll_channels,
        transport=comm.transport,
        machine=None if machine is None else machine.name,
        choices=tuple(choices),
        evidence=str(comm.evidence),
    )
