"""What a reader of a judged log must know besides the verdicts, one line each."""

from collections.abc import Iterator, Sequence

from autotune.effect.reads import workers
from autotune.effect.stages import Stage
from autotune.nccl_log_types import NcclLog


def nothing_in(log: NcclLog) -> str:
    """Why a log without a process says nothing, and the way out."""
    if log.bare_version is not None:
        return (
            f"the log shows NCCL {log.bare_version} and no more: run with NCCL_DEBUG=INFO instead "
            "of VERSION"
        )
    return (
        "no line of NCCL's is in the log: set NCCL_DEBUG=INFO where the workers start (and "
        "NCCL_DEBUG_FILE with %h.%p, if their output goes elsewhere)"
    )


def notes(log: NcclLog, stages: Sequence[Stage]) -> Iterator[str]:
    """Damage, missing ranks, what cannot be predicted, NCCL's own warnings."""
    yield from log.notes
    if not log.processes:
        yield nothing_in(log)
    elif not any(process.informative for process in log.processes):
        yield "the log holds warnings only: NCCL_DEBUG=INFO shows what NCCL read and chose"
    yield from _missing_ranks(log, stages)
    for stage in stages:
        if isinstance(stage.scene, str):
            yield f"effects by size are not predicted: {stage.scene}"
        elif stage.scene.machine is None:
            yield "no known machine gives this communicator: pass --machine to predict times"
        if stage.comm.tuner is not None:
            yield f"tuner plugin {stage.comm.tuner} is loaded and may override the choice"
    if len(stages) > 1:
        sizes = ", ".join(str(stage.comm.num_ranks) for stage in stages)
        yield (
            f"{len(stages)} communicators ({sizes} ranks): a server has PyTorch's and its own, and "
            "one for each parallel group"
        )
    if len(log.versions) > 1:
        yield f"several NCCL versions in one run: {', '.join(log.versions)}"
    for process in log.processes:
        for warning in process.warnings[:20]:
            yield f"{warning.text} ({warning.evidence})"


def _missing_ranks(log: NcclLog, stages: Sequence[Stage]) -> Iterator[str]:
    """Ranks of the largest communicator that left no line."""
    main = max(stages, key=lambda stage: stage.comm.num_ranks or 0, default=None)
    if main is None:
        return
    total, group = main.comm.num_ranks or 0, main.comm.group
    ranks = {
        comm.rank
        for process in workers(log)
        for comm in process.comms
        if comm.evidence == main.comm.evidence or (group is not None and comm.group == group)
    }
    missing = sorted(set(range(total)) - ranks)
    if not missing:
        return
    why = "NCCL_DEBUG_FILE needs %p"
    if log.num_folded:
        why = "Ray leaves out what another worker printed: RAY_DEDUP_LOGS=0 shows all"
    yield (
        f"{total - len(missing)} of {total} ranks wrote a log (missing: "
        f"{', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''}); {why}"
    )
