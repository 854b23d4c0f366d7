"""Joins what a watched run showed: NCCL's logs, and the environment of each process on the way.

The logs decide whether a setting is in force; the environments say where a lost one was lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.effect.judge import judge_log
from autotune.effect.launch import Launch
from autotune.effect.notes import nothing_in
from autotune.effect.reads import same_value
from autotune.effect.verdicts import Judgement, KnobVerdict, WorkerView
from autotune.effect.watch import SeenProcess, Watched
from autotune.nccl_log import parse_nccl_logs
from model.machine import Machine


def judge_run(
    watched: Watched,
    launch: Launch,
    expected: Mapping[str, str],
    *,
    machine: Machine | None = None,
    sizes: Sequence[int] = (),
) -> Judgement:
    """Judge the asked variables by a run; without NCCL logs by the workers' environments."""
    wanted = {
        name: value
        for name, value in launch.asked.items()
        if name.startswith("NCCL_") and "DEBUG" not in name
    } | dict(expected)
    log = parse_nccl_logs(watched.logs)
    judgement = judge_log(log, wanted, machine=machine, sizes=sizes)
    # we asked NCCL for its log: that there is none has another reason, told below
    told = [note for note in judgement.notes if log.processes or note != nothing_in(log)]
    knobs = tuple(_place(knob, watched, launch) for knob in judgement.knobs)
    return replace(
        judgement,
        knobs=knobs,
        workers=tuple(_view(process) for process in watched.processes),
        notes=(*told, *_notes(watched, launch)),
    )


#: what of a worker's environment is told
_SHOWN = ("NCCL_", "CUDA_", "TORCH_", "VLLM_", "SGLANG_", "LD_PRELOAD", "LD_LIBRARY_PATH")


def _view(process: SeenProcess) -> WorkerView:
    environment = process.environment
    return WorkerView(
        pid=process.pid,
        parent=process.parent,
        name=process.name,
        environment=None
        if environment is None
        else {n: v for n, v in sorted(environment.items()) if n.startswith(_SHOWN)},
        nccl_library=process.nccl_library,
        nccl_version=process.nccl_version,
    )


def _place(knob: KnobVerdict, watched: Watched, launch: Launch) -> KnobVerdict:
    """Add where a value was lost, and judge by environments what no log tells."""
    processes = watched.processes
    if knob.asked is None or knob.verdict in ("effective", "inert") or not processes:
        return knob
    if knob.lost_at in _INSIDE:
        # it arrived, and NCCL makes nothing of it
        return knob
    rows = [p for p in processes if p.environment is not None]
    if not rows:
        return knob
    having = {p.pid for p in rows if _has(p.environment, knob)}
    root = rows[0] if rows[0].pid == processes[0].pid else None
    if root is not None and root.pid not in having and not _has(root.started, knob):
        wrapper = launch.lost.get(knob.name)
        value = (root.environment or {}).get(knob.name)
        shown = f"has {knob.name}={value}, not" if value is not None else "has no"
        text = f"{shown} {knob.asked if value is not None else f'{knob.name}={knob.asked}'}"
        return _lost(knob, wrapper or "parent", f"the command itself (pid {root.pid}) {text}")
    without = [p for p in _workers(rows, watched) if p.pid not in having]
    if not without:
        return _arrived(knob, rows)
    broken = _topmost(without[0], rows, having)
    value = (broken.environment or {}).get(knob.name)
    if _has(broken.started, knob):
        now = "unset" if value is None else value
        return _lost(
            knob, f"inside pid {broken.pid} ({broken.name[:60]}), after it started",
            f"pid {broken.pid} was started with {knob.name}={knob.asked} and changed it itself: "
            f"now {now}",
        )  # fmt: skip
    lost = (
        f"between pid {broken.parent} and pid {broken.pid} ({broken.name[:60]}), "
        f"{_how(broken, launch)}"
    )
    reason = f"{len(without)} of {len(rows)} processes lack {knob.name}={knob.asked}"
    if value:
        reason = f"pid {broken.pid} has {knob.name}={value} instead of {knob.asked}"
    return _lost(knob, lost, f"{reason}; lost {lost}")


def _topmost(process: SeenProcess, rows: Sequence[SeenProcess], having: set[int]) -> SeenProcess:
    """The first on the way down to a process that lacks the value."""
    by_pid = {row.pid: row for row in rows}
    seen: set[int] = set()
    while process.parent in by_pid and process.parent not in having | seen:
        seen.add(process.pid)
        process = by_pid[process.parent]
    return process


#: places that say that a value came as far as NCCL
_INSIDE = ("inside NCCL", "not a variable of this NCCL", "not a variable of NCCL")


#: processes of Python's own that never run anything of the program
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.resou")


def _lost(knob: KnobVerdict, where: str, reason: str) -> KnobVerdict:
    return replace(knob, verdict="not effective", lost_at=where, reason=reason)


def _arrived(knob: KnobVerdict, rows: Sequence[SeenProcess]) -> KnobVerdict:
    """Every worker has it: NCCL's log alone could say more."""
    if knob.verdict == "not effective":
        where = "inside the workers: their environment has it, NCCL did not use it"
        return replace(knob, lost_at=where)
    if not knob.name.startswith("NCCL_"):
        return replace(
            knob,
            reason=f"in the environment of {_all(rows)}, by C getenv; whether the program uses it "
            "no log tells",
        )
    if knob.read is not None:
        return knob
    return replace(
        knob,
        reason=f"in the environment of {_all(rows)}, but no NCCL log shows whether it was used",
    )


def _all(rows: Sequence[SeenProcess]) -> str:
    return "the one process seen" if len(rows) == 1 else f"all {len(rows)} processes seen"


def _workers(rows: Sequence[SeenProcess], watched: Watched) -> Sequence[SeenProcess]:
    """Processes that matter: with NCCL, else those that lived to the end, else all."""
    rows = [p for p in rows if not any(helper in p.name for helper in _HELPERS)]
    with_nccl = [p for p in rows if p.nccl_library is not None]
    if with_nccl:
        return with_nccl
    logged = {p.pid for p in rows if any(f".{p.pid}." in log.name for log in watched.logs)}
    if logged:
        return [p for p in rows if p.pid in logged]
    living = [p for p in rows if p.alive]
    return living if len(living) > 1 else rows


def _has(environment: Mapping[str, str] | None, knob: KnobVerdict) -> bool:
    found = (environment or {}).get(knob.name)
    return found is not None and same_value(knob.name, knob.asked or "", found)


def _how(process: SeenProcess, launch: Launch) -> str:
    for method in ("forkserver", "spawn"):
        if f"multiprocessing.{method}" in process.name:
            return method
    if launch.start_method not in ("unknown", "exec"):
        return launch.start_method
    return "started with an environment of its own"


def _notes(watched: Watched, launch: Launch) -> list[str]:
    notes = ["way: " + " -> ".join(launch.steps), f"processes seen: {len(watched.processes)}"]
    changed = [p for p in watched.processes if p.started is None and p.environment is not None]
    if changed:
        notes.append(
            f"of them {len(changed)} blank their /proc/<pid>/environ (setproctitle): their "
            "environment was read from their memory"
        )
    blank = [p for p in watched.processes if p.environment is None]
    if blank:
        notes.append(
            f"{len(blank)} processes show their environment neither in memory nor in /proc"
        )
    libraries = {p.nccl_library for p in watched.processes if p.nccl_library is not None}
    if len(libraries) > 1:
        notes.append(f"several NCCL libraries mapped: {', '.join(sorted(libraries))}")
    elif libraries:
        notes.append(f"mapped NCCL: {libraries.pop()}")
    if not watched.logs:
        notes.append(
            "no NCCL log was written: no communicator was made in this time (longer --run?)"
        )
    if watched.exit_code not in (None, 0):
        last = watched.output_tail.strip().splitlines()[-1:]
        said = f": {last[0][:160]}" if last else ""
        notes.append(f"the command ended by itself with code {watched.exit_code}{said}")
    return notes
