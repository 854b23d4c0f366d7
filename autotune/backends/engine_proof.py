"""Proof that a started engine runs with the settings asked for, from its workers and NCCL's log.

NCCL decides algorithm, protocol and channels call by call, by message size: the proof has the
sizes of the workload reduced once, so that the log holds what NCCL does with each of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.backends.base import BackendFailure
from autotune.backends.effective import (
    environment_problems,
    library_problems,
    nccl_log_problems,
    nccl_summary,
    not_effective,
)
from autotune.launch import nccl_environment
from autotune.nccl_log import parse_nccl_logs
from autotune.provenance import recorded_environment
from autotune.records import RankEnvironment
from autotune.schemas import Study
from model.spec import Knobs, Scalar

#: lengths that pieces of a prompt are padded to, tokens
PREFILL_ROWS = (16, 64, 256, 512)
#: a space may list more trees than are worth a call each at every start
_MOST_SIZES = 48


class Worker(Protocol):
    """``engine.results.WorkerEnvironment``."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def nccl_library(self) -> str | None: ...
    @property
    def nccl_version(self) -> str | None: ...


class Started(Protocol):
    """What is asked of ``engine.api.Engine``."""

    def environment(self) -> Sequence[Worker]: ...

    def allreduce_bench(self, sizes_bytes: Sequence[int], repeats: int) -> object: ...


@dataclass(frozen=True, slots=True)
class Proof:
    """What was read back."""

    ranks: tuple[RankEnvironment, ...] = ()
    #: ``effective.nccl_summary``; empty where NCCL carries nothing
    nccl: Mapping[str, object] | None = None


def allreduce_sizes(
    study: Study, hidden: int, element_bytes: int, batch_of: Callable[[int], int]
) -> tuple[int, ...]:
    """Bytes of each all-reduce that the study's workload makes, ascending.

    A forward reduces [rows, hidden]: a row per request when decoding, a tree per request when
    verifying, a padded piece of a prompt in a prefill. ``batch_of``: the batch that so many run at.
    """
    rows = set()
    tokens = {1, *_tree_sizes(study.space)}
    for level in study.workload.concurrency:
        for batch in (level, batch_of(level)):
            rows |= {batch * each for each in tokens}
    longest = min(study.workload.input_len, PREFILL_ROWS[-1])
    rows.add(next(n for n in PREFILL_ROWS if n >= longest))
    sizes = sorted(row * hidden * element_bytes for row in rows)
    if len(sizes) > _MOST_SIZES:
        # ends and an even choice between them: NCCL's switching points are few
        step = (len(sizes) - 1) / (_MOST_SIZES - 1)
        sizes = [sizes[round(index * step)] for index in range(_MOST_SIZES)]
    return tuple(sizes)


def _tree_sizes(space: Mapping[str, Sequence[Scalar]]) -> set[int]:
    """Tokens per request of a verify: chains of each depth, and the trees listed."""
    if "eagle3" not in space.get("speculation.method", ()):
        return set()
    topk = [int(value) for value in space.get("speculation.topk", (1,))]
    steps = [int(value) for value in space.get("speculation.steps", (3,))]
    found = {depth + 1 for depth in steps} if 1 in topk else set()
    if max(topk) > 1:
        most = max(1 + k + (depth - 1) * k * k for k in topk for depth in steps)
        listed = {int(value) for value in space.get("speculation.draft_tokens", ())}
        found |= {tokens for tokens in listed if 2 <= tokens <= most}
    return found


def nccl_carries(device: str, base: Knobs) -> bool:
    """Whether NCCL carries the all-reduces, so that its log must show what was asked of it."""
    return device == "cuda" and base.tp > 1 and base.collectives_backend in ("auto", "nccl")


def prove(
    engine: Started,
    base: Knobs,
    *,
    logs: Callable[[], Iterable[Path]] | None,
    sizes_bytes: Sequence[int],
) -> Proof:
    """Read back what the workers have. ``logs``: NCCL's files now; None: it carries nothing.

    Raises ``BackendFailure`` (``setting_not_effective``) naming the first difference.
    """
    ranks = tuple(
        RankEnvironment(
            rank=worker.rank,
            pid=worker.pid,
            environment=recorded_environment(worker.environment),
            nccl_library=worker.nccl_library,
            nccl_version=worker.nccl_version,
        )
        for worker in engine.environment()
    )
    expected = nccl_environment(base)
    problems = environment_problems(expected, ranks, base.tp)
    problems += library_problems(ranks)
    summary = None
    if logs is not None:
        # also what makes the communicator: there is none, and no log, before the first collective
        engine.allreduce_bench(sizes_bytes, 1)
        log = parse_nccl_logs(logs())
        problems += nccl_log_problems(expected, ranks, log)
        summary = nccl_summary(log)
    if problems:
        raise BackendFailure(not_effective(problems))
    return Proof(ranks, summary)
