"""Judges settings by NCCL's own logs: did they arrive, and do they change what NCCL does?

A variable is *not effective* when a worker did not read it (or read another value); *inert* when
without it NCCL would run the very same kernels at every size; *effective* otherwise, with what it
does by size. Everything that the log cannot tell is *unknown*, with the way to find out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.effect.by_size import DEFAULT_SIZES, Scene, SizeEffect
from autotune.effect.inert import inert_reason
from autotune.effect.ranges import sizes_in_words
from autotune.effect.reads import (
    SILENT,
    env_logged,
    environment_read,
    label,
    reads_of,
    workers,
)
from autotune.effect.scene import scene_of_log
from autotune.effect.suggest import suggestions
from autotune.effect.verdicts import CommSummary, Judgement, KnobVerdict, Suggestion
from autotune.nccl_log_types import CommLog, NcclLog, ProcessLog
from model.machine import Machine
from model.nccl.settings import ALGORITHMS, PROTOCOLS, NcclSettings, c_integer, parse_list

#: variables whose effect on an all-reduce the selector knows
MODELLED = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_LL128_NTHREADS",
    "NCCL_THREAD_THRESHOLDS", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
    "NCCL_NVLS_ENABLE",
)  # fmt: skip
#: what describes or restricts the host rather than tunes it
_HOST = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A communicator with the settings it was made under."""

    process: ProcessLog
    comm: CommLog
    scene: Scene | str
    environment: Mapping[str, str]
    sizes: tuple[int, ...]


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
    stages = tuple(_stages(log, machine, tuple(sizes)))
    names = list(asked) + [name for name in environment_read(log) if name not in asked]
    knobs = tuple(_judge(log, stages, name, asked) for name in names)
    tuned = [name for name in names if name in MODELLED and (name in asked or name not in _HOST)]
    together: tuple[SizeEffect, ...] = ()
    offers: tuple[Suggestion, ...] = ()
    main = next((stage for stage in stages if isinstance(stage.scene, Scene)), None)
    if main is not None and isinstance(main.scene, Scene):
        present = [name for name in tuned if name in main.environment]
        if len(present) > 1:
            together = _compare(main, present)
        offers = suggestions(main.scene, main.environment, main.sizes, _HOST)
    return Judgement(
        files=log.files,
        num_lines=log.num_lines,
        versions=log.versions,
        comms=tuple(_summary(stage) for stage in stages),
        knobs=knobs,
        together=together,
        suggestions=offers,
        notes=tuple(_notes(log, stages)),
    )


def _stages(log: NcclLog, machine: Machine | None, sizes: tuple[int, ...]) -> Iterator[Stage]:
    """One stage per communicator, from the rank that logs the choices (else any)."""
    seen: set[str] = set()
    processes = sorted(workers(log), key=lambda p: (not p.choices, min(p.ranks, default=1 << 30)))
    for process in processes:
        for index, comm in enumerate(process.comms):
            key = comm.comm_id or f"{process.host}:{process.pid}:{comm.comm}"
            if key in seen or (comm.num_ranks or 0) < 2:
                continue
            seen.add(key)
            own = sorted(
                {c.size_bytes for c in process.choices
                 if c.comm == index and c.function in ("AllReduce", "unknown")}
            )  # fmt: skip
            yield Stage(
                process=process,
                comm=comm,
                scene=scene_of_log(log, process, comm, machine),
                environment=process.environment,
                sizes=sizes or tuple(own) or DEFAULT_SIZES,
            )


def _judge(
    log: NcclLog, stages: Sequence[Stage], name: str, expected: Mapping[str, str]
) -> KnobVerdict:
    asked = expected.get(name)
    reads = reads_of(log, name)
    common = {"name": name, "asked": asked, "read": reads.value, "evidence": reads.evidence}

    def verdict(kind: str, reason: str, **more: object) -> KnobVerdict:
        return KnobVerdict(**{**common, "verdict": kind, "reason": reason, **more})  # type: ignore[arg-type]

    if name in SILENT:
        shown = "a log exists" if name == "NCCL_DEBUG" else "NCCL never prints it"
        return verdict("effective" if name == "NCCL_DEBUG" else "unknown", shown)
    if not name.startswith("NCCL_"):
        return verdict("unknown", "not NCCL's: read each worker's environment (`-- CMD --run`)")
    if not workers(log):
        return verdict("unknown", "the log holds no line of a process")
    off = next((n for n in ("NCCL_P2P_DISABLE",) if _is_one(environment_read(log), n)), None)
    if name == "NCCL_P2P_LEVEL" and off is not None and len(reads.missing) == len(workers(log)):
        where = reads_of(log, off).evidence
        return verdict(
            "inert", "NCCL_P2P_DISABLE=1: with peer-to-peer off NCCL never looks at the level; all "
            "traffic goes through host memory", evidence=where,
        )  # fmt: skip
    if asked is not None:
        problem = _absent(log, name, asked)
        if problem is not None:
            return verdict(*problem)
    denied = _denied_by_choices(log, name)
    if denied is not None:
        return verdict("not effective", *denied[:1], evidence=denied[1])
    if name not in MODELLED:
        return verdict("unknown", "read by NCCL; what it does to an all-reduce is not modelled")
    return _matters(stages, name, verdict)


def _is_one(environment: Mapping[str, str], name: str) -> bool:
    return c_integer(environment.get(name, "0")) == 1


def _absent(log: NcclLog, name: str, asked: str) -> tuple[str, str] | None:
    """Verdict and reason where not every worker read the asked value, or None."""
    reads = reads_of(log, name)
    others = reads.other_than(asked)
    if others:
        process, read = others[0]
        return "not effective", (
            f"{label(process)} read {read.value}, not {asked}"
            + (f"; {len(others)} of {len(workers(log))} workers" if len(others) > 1 else "")
            + ": set again by a launcher, a server or a configuration file"
        )
    if not reads.missing:
        return None
    blind = [process for process in reads.missing if env_logged(process) is None]
    if len(blind) == len(reads.missing):
        contradicted = _denied_by_choices(log, name, asked)
        if contradicted is not None:
            return "not effective", contradicted[0]
        return "unknown", (
            "no \"set by environment\" line at all in the log of "
            f"{', '.join(label(p) for p in blind[:4])}: add ENV to NCCL_DEBUG_SUBSYS"
        )  # fmt: skip
    who = ", ".join(label(process) for process in reads.missing[:4])
    return "not effective", (
        f"{len(reads.missing)} of {len(workers(log))} workers never read it ({who}): NCCL prints "
        f"\"{name} set by environment\" for each variable it finds, and there is no such line"
    )  # fmt: skip


def _denied_by_choices(
    log: NcclLog, name: str, asked: str | None = None
) -> tuple[str, tuple[str, ...]] | None:
    """A logged choice that the list in NCCL_ALGO or NCCL_PROTO forbids: reason and line."""
    elements = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}.get(name)
    if elements is None:
        return None
    for process in workers(log):
        text = asked if asked is not None else process.environment.get(name)
        if text is None:
            continue
        try:
            listed = parse_list(name, text, elements)
        except ValueError as error:
            return f"NCCL refuses it and makes no communicator: {error}", ()
        if listed is None:
            continue
        allowed = {e.lower() for e, on in zip(elements, listed, strict=True) if on}
        for choice in process.choices:
            ran = choice.algo if name == "NCCL_ALGO" else choice.proto
            if choice.function != "AllReduce" or choice.algo == "SYMMETRIC":
                continue
            if ran.lower().replace("_", "") not in allowed:
                return (
                    f"{label(process)} ran {choice.algo}/{choice.proto} for {choice.size_bytes} "
                    f"bytes, which {name}={text} forbids: a tuner plugin or another library "
                    "decides",
                    (str(choice.evidence),),
                )
    return None


def _matters(
    stages: Sequence[Stage], name: str, verdict: Callable[..., KnobVerdict]
) -> KnobVerdict:
    """Inert or effective, by the communicators of the log."""
    if not stages:
        return verdict("unknown", "the log shows no communicator of two or more ranks")
    problems = [stage.scene for stage in stages if isinstance(stage.scene, str)]
    if problems:
        known = inert_reason(stages[0].comm, stages[0].environment, name, None, ())
        if known is not None:
            return verdict("inert", known)
        return verdict("unknown", f"read, but whether it matters is not to be told: {problems[0]}")
    effects = [effect for stage in stages for effect in _compare(stage, [name])]
    first = stages[0]
    if all(effect.outcome == "inert" for effect in effects):
        scene = first.scene if isinstance(first.scene, Scene) else None
        known = inert_reason(first.comm, first.environment, name, scene, effects)
        if name == "NCCL_NVLS_ENABLE" and known is None:
            return verdict("unknown", "whether this host has NVLink multicast is not in the log")
        return verdict("inert", known or _same_kernels(effects), sizes=tuple(effects))
    return verdict("effective", sizes_in_words(effects), sizes=tuple(effects))


def _compare(stage: Stage, names: Sequence[str]) -> tuple[SizeEffect, ...]:
    """The stage's settings against the same without ``names``."""
    assert isinstance(stage.scene, Scene)
    rest = {key: value for key, value in stage.environment.items() if key not in names}
    ours = NcclSettings.from_env(stage.environment)
    return stage.scene.compare(ours, NcclSettings.from_env(rest), stage.sizes)


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


def _notes(log: NcclLog, stages: Sequence[Stage]) -> Iterator[str]:
    ranks = {rank for process in workers(log) for rank in process.ranks}
    for stage in stages[:1]:
        total = stage.comm.num_ranks or 0
        if len(ranks) < total:
            missing = sorted(set(range(total)) - ranks)
            yield (
                f"{len(ranks)} of {total} ranks wrote a log (missing: "
                f"{', '.join(map(str, missing[:8]))}); NCCL_DEBUG_FILE needs %p"
            )
    for stage in stages:
        if isinstance(stage.scene, str):
            yield f"effects by size are not predicted: {stage.scene}"
        elif stage.scene.machine is None:
            yield "no known machine gives this communicator: pass --machine to predict times"
        if stage.comm.tuner is not None:
            yield f"tuner plugin {stage.comm.tuner} is loaded and may override the choice"
    if len(stages) > 1:
        yield f"{len(stages)} communicators: a server has one of torch's and one of its own"
    if len(log.versions) > 1:
        yield f"several NCCL versions in one run: {', '.join(log.versions)}"
    for process in log.processes:
        for warning in process.warnings[:20]:
            yield f"{warning.text} ({warning.evidence})"
