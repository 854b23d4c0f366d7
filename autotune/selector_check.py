"""Compares every all-reduce choice in NCCL's logs with the selector's.

Topology, version and environment are read from the logs. What a log never says, the compute
capability, is found by elimination: candidates must give the log's own latency/bandwidth table and
the log's own graphs. Nothing is fitted to the choices.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.nccl_log import parse_nccl_logs
from autotune.nccl_log_types import CommLog, LoggedChoice, NcclLog, ProcessLog
from autotune.selector_log import LoggedCommunicator
from model.nccl.selector import Selector
from model.nccl.settings import NcclSettings
from model.nccl.versions import Release, release_for

#: tried in this order: 9.0, 12.0, 10.0, 8.9, 8.6, 8.0, 7.0
CAPABILITIES = (90, 120, 100, 89, 86, 80, 70)
HINT = "set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING (NCCL 2.24 or newer)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that the log and the selector see differently."""

    kind: str
    logged: str
    selector: str
    count: int
    evidence: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommReport:
    """One communicator: what was compared and what was found about it."""

    comm: str | None
    version: str
    num_ranks: int
    num_nodes: int
    transport: str | None
    env: dict[str, str]
    #: candidates that agree with the log's table and graphs; the first was used
    compute_capability: tuple[int, ...]
    lines: int
    equal: int
    table_entries: int
    table_equal: int
    #: whether the search gives the logged graphs; None where the topology is not logged
    search_equal: bool | None
    channels_logged: int | None
    channels_selector: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SelectorReport:
    """All communicators of a set of logs. ``lines`` counts logged choices, repeats included."""

    comms: tuple[CommReport, ...]
    #: choices that were not compared, by reason
    not_compared: dict[str, int] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        return sum(comm.lines for comm in self.comms)

    @property
    def equal(self) -> int:
        return sum(comm.equal for comm in self.comms)

    @property
    def differences(self) -> tuple[Difference, ...]:
        return tuple(d for comm in self.comms for d in comm.differences)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "lines": self.lines,
            "equal": self.equal,
            "differences": [_fields(difference) for difference in self.differences],
            "not_compared": self.not_compared,
            "communicators": [
                {k: v for k, v in _fields(comm).items() if k != "differences"}
                for comm in self.comms
            ],
        }


def check_selector(
    paths: Iterable[Path | str],
    *,
    compute_capability: int | None = None,
    version: str | None = None,
) -> SelectorReport:
    """Compare every AllReduce choice of the logs with the selector's.

    ``compute_capability`` (90 = Hopper) and ``version`` overrule what the logs show. Raises
    ``UserError`` when the logs hold no choice, no graph or no version, or a version that the
    selector does not know.
    """
    return check_log(parse_nccl_logs(paths), compute_capability=compute_capability, version=version)


def check_log(
    log: NcclLog, *, compute_capability: int | None = None, version: str | None = None
) -> SelectorReport:
    """The same for a parsed log."""
    where = ", ".join(log.files) or "the log"
    reports: list[CommReport] = []
    left_out: Counter[str] = Counter()
    for process in log.processes:
        by_comm: dict[int, list[LoggedChoice]] = {}
        for choice in process.choices:
            reason = _why_not(choice)
            if reason is not None:
                left_out[reason] += choice.count
            elif choice.comm is not None:
                by_comm.setdefault(choice.comm, []).append(choice)
            else:
                left_out["no communicator in the log"] += choice.count
        for index, choices in by_comm.items():
            comm = process.comms[index]
            release = _release(version or process.version or _any_version(log), where)
            caps = CAPABILITIES if compute_capability is None else (compute_capability,)
            reports.append(_check_comm(log, process, comm, choices, release, caps, where))
    if not reports:
        raise UserError(
            f"{where}: no AllReduce choice of rank 0 to compare"
            + (f" ({_reasons(left_out)})" if left_out else "")
            + f"; {HINT}"
        )
    return SelectorReport(tuple(reports), dict(left_out))


def _why_not(choice: LoggedChoice) -> str | None:
    if choice.function not in ("AllReduce", "unknown"):
        return "other collective"
    if choice.algo == "SYMMETRIC":
        return "symmetric-memory kernel"
    if choice.channel_low < 0:
        return "log of NCCL before 2.24: no channels"
    if choice.channel_low > 0:
        return "part of a grouped call"
    return None


def _any_version(log: NcclLog) -> str | None:
    return log.versions[0] if len(log.versions) == 1 else None


def _release(version: str | None, where: str) -> Release:
    if version is None:
        raise UserError(f"{where}: the log does not show the NCCL version; give --nccl-version")
    try:
        return release_for(version)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _check_comm(
    log: NcclLog,
    process: ProcessLog,
    comm: CommLog,
    choices: list[LoggedChoice],
    release: Release,
    capabilities: tuple[int, ...],
    where: str,
) -> CommReport:
    env = process.environment
    try:
        settings = NcclSettings.from_env(env)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    try:
        candidates = [
            LoggedCommunicator.of(log, comm, settings, release, capability)
            for capability in capabilities
        ]
    except ValueError as error:
        raise UserError(f"{where}: {error}; {HINT}") from None
    fewest = min(candidate.misses for candidate in candidates)
    fitting = [candidate for candidate in candidates if candidate.misses == fewest]
    best = fitting[0]
    selector = Selector(best.comm)
    differences = list(_differences(best, comm))
    equal = 0
    for choice in choices:
        difference = _compare(selector, choice)
        if difference is None:
            equal += choice.count
        else:
            differences.append(difference)
    notes = []
    if settings.unmodelled:
        notes.append(f"{', '.join(settings.unmodelled)} set: the choice may be another's")
    if comm.tuner is not None:
        notes.append(f"tuner plugin {comm.tuner} loaded: it may override the choice")
    if any(choice.ambiguous for choice in choices):
        notes.append("several communicators in this process: choices are taken as the newest's")
    return CommReport(
        comm=comm.comm,
        version=process.version or release.name,
        num_ranks=best.comm.num_ranks,
        num_nodes=best.comm.num_nodes,
        transport=comm.transport,
        env=env,
        compute_capability=tuple(c.comm.min_cc for c in fitting),
        lines=sum(choice.count for choice in choices),
        equal=equal,
        table_entries=best.table_entries,
        table_equal=best.table_entries - len(best.table_misses),
        search_equal=best.search_equal,
        channels_logged=comm.coll_channels,
        channels_selector=best.channels_by_rule,
        differences=tuple(differences),
        notes=tuple(notes),
    )


def _differences(found: LoggedCommunicator, logged: CommLog) -> Iterator[Difference]:
    """Differences that are no choices: table entries, channels, graphs."""
    for algo, proto, theirs, ours in found.table_misses:
        entry = logged.entry(algo, proto)
        evidence = "" if entry is None else str(entry.evidence)
        yield Difference(f"table {algo}/{proto}", theirs, ours, 1, evidence)
    if logged.coll_channels not in (None, found.channels_by_rule):
        yield Difference(
            "channels", str(logged.coll_channels), str(found.channels_by_rule), 1,
            str(logged.evidence),
        )  # fmt: skip
    if found.search_equal is False:
        yield Difference("graph search", "other graphs", "", 1, str(logged.evidence))


def _compare(selector: Selector, choice: LoggedChoice) -> Difference | None:
    logged = f"{choice.algo}/{choice.proto} channels 0..{choice.channel_high}"
    try:
        ours = selector.choose(choice.size_bytes)
    except ValueError as error:
        selected = str(error)
    else:
        selected = f"{ours.algo.upper()}/{ours.proto.upper()} channels 0..{ours.channels - 1}"
    if selected == logged:
        return None
    return Difference(
        "choice", logged, selected, choice.count, str(choice.evidence), choice.size_bytes
    )


def _reasons(left_out: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in left_out.items())


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}
