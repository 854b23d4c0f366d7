"""Why a setting that was asked for is not in the log, or is there with another value.

A missing line is a proof only where NCCL would have printed one: it says nothing of empty values,
of NCCL_P2P_DISABLE=0, of words it does not know, of variables that no code path asked for, and of
lines that a filter or a collector of logs left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.effect.nccl_variables import owner_of, unread_because
from autotune.effect.reads import (
    P2P_LEVELS,
    Reads,
    env_logged,
    label,
    reads_of,
    workers,
)
from autotune.effect.server_sets import setter_of
from autotune.effect.verdicts import Verdict
from autotune.nccl_log_types import NcclLog, ProcessLog
from model.nccl.settings import ALGORITHMS, PROTOCOLS, c_integer, parse_list

LISTS = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}
#: read whenever a communicator of two or more ranks is made, by every release
ALWAYS_READ = frozenset(
    {"NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
     "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_NTHREADS",
     "NCCL_LL128_NTHREADS", "NCCL_THREAD_THRESHOLDS", "NCCL_NVLS_ENABLE", "NCCL_P2P_LEVEL",
     "NCCL_P2P_DISABLE", "NCCL_CUMEM_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_GRAPH_FILE",
     "NCCL_TOPO_FILE", "NCCL_HOSTID"}
)  # fmt: skip
#: beginnings of variables of the network, and of shared memory
_NETWORK = ("NCCL_IB_", "NCCL_NET_", "NCCL_NSOCKS_", "NCCL_SOCKET_", "NCCL_GDR_", "NCCL_PXN_",
            "NCCL_CROSS_NIC", "NCCL_GIN_", "NCCL_RMA_", "NCCL_DMABUF_")  # fmt: skip
_SHARED = ("NCCL_SHM_",)
#: read whenever a connection of this kind is made
_READ_FOR = {
    "SHM": frozenset({"NCCL_SHM_DISABLE", "NCCL_SHM_LOCALITY", "NCCL_SHM_USE_CUDA_MEMCPY"}),
    "P2P": frozenset({"NCCL_P2P_READ_ENABLE", "NCCL_P2P_DIRECT_DISABLE"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Verdict on a value that is not there, with where it was lost if that is known."""

    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] | None = None
    lost_at: str | None = None


def absent(log: NcclLog, name: str, asked: str) -> Absence | None:
    """What speaks against ``asked`` being in force in every worker, or None."""
    reads = reads_of(log, name)
    others = reads.other_than(asked)
    if others:
        return _other_value(log, name, asked, reads)
    if not reads.missing:
        return None
    silent = _silent_value(log, name, asked, reads)
    if silent is not None:
        return silent
    refused = _refused(log, name)
    if refused is not None:
        return refused
    if log.num_folded and _folded_cover(log, reads):
        return None if reads.found else _unread(log, name, reads)
    return _unread(log, name, reads)


def _other_value(log: NcclLog, name: str, asked: str, reads: Reads) -> Absence:
    others = reads.other_than(asked)
    process, read = others[0]
    who = f"{label(process)} read {read.value}, not {asked or 'an empty value'}"
    if len(others) > 1:
        who += f"; {len(others)} of {len(workers(log))} workers"
    evidence = (str(read.evidence),)
    same = [r for r in process.env if r.name == name and not reads.differs(asked, r.value)]
    if same:
        return Absence(
            verdict="not effective",
            reason=f"{label(process)} read {same[0].value} first and {read.value} for a later "
            "communicator: changed inside the process",
            evidence=(str(same[0].evidence), str(read.evidence)),
            lost_at="inside the worker, between two communicators",
        )
    if name not in LISTS and c_integer(asked) == c_integer(read.value) and asked[:1].isdigit():
        return Absence(
            verdict="not effective",
            reason=f"NCCL made {read.value} of {asked}: it takes the digits in front and knows no "
            "units; write the plain number",
            evidence=evidence,
            lost_at="inside NCCL",
        )
    if name not in LISTS and read.value == "0" and not asked.strip()[:1].isdigit() and asked:
        return Absence(
            verdict="not effective",
            reason=f"NCCL made 0 of {asked}: it is no number",
            evidence=evidence,
            lost_at="inside NCCL",
        )
    setter = setter_of(name, read.value)
    if setter is not None:
        return Absence(
            verdict="not effective",
            reason=f"{who}: {setter}",
            evidence=evidence,
            lost_at="overwritten by the server",
        )
    # all but the two lists are read once in a process
    late = "" if name in LISTS else ", or changed after NCCL had read it"
    return Absence(
        verdict="not effective",
        reason=f"{who}: set again by a launcher, a server or a configuration file{late}",
        evidence=evidence,
        lost_at="between the shell and NCCL",
    )


def _silent_value(log: NcclLog, name: str, asked: str, reads: Reads) -> Absence | None:
    """Values of which NCCL prints nothing."""
    if asked.strip() == "":
        return Absence(
            verdict="inert",
            reason="an empty value is none to NCCL: it prints nothing and keeps its own choice",
        )
    if name == "NCCL_P2P_DISABLE" and c_integer(asked) != 1:
        return Absence(
            verdict="inert",
            reason=f"NCCL prints only NCCL_P2P_DISABLE=1; {asked} is what it does by itself",
        )
    if name == "NCCL_P2P_LEVEL" and asked not in P2P_LEVELS and not asked[:1].isdigit():
        near = next((level for level in P2P_LEVELS if level == asked.strip().upper()), None)
        return Absence(
            verdict="not effective",
            reason=f"NCCL knows no level {asked!r} and passes over it without a word: it compares "
            f"letter by letter; "
            + (f"write {near}" if near else f"one of {', '.join(P2P_LEVELS)}"),
            lost_at="inside NCCL",
        )
    return None


def _refused(log: NcclLog, name: str) -> Absence | None:
    """A number that NCCL could not take."""
    for process in workers(log):
        for warning in process.warnings:
            if warning.text.startswith("Invalid value") and f" for {name}," in warning.text:
                return Absence(
                    verdict="not effective",
                    reason=f"NCCL refused the value: {warning.text}",
                    evidence=(str(warning.evidence),),
                    lost_at="inside NCCL",
                )
    return None


def _folded_cover(log: NcclLog, reads: Reads) -> bool:
    """Whether the lines that Ray left out account for every worker without one of its own."""
    folded = sum(read.num_folded for _, read in reads.found)
    return len(reads.found) + folded >= _num_workers(log)


def _num_workers(log: NcclLog) -> int:
    sizes = [comm.num_ranks or 0 for process in workers(log) for comm in process.comms]
    return max([len(workers(log)), *sizes])


def _unread(log: NcclLog, name: str, reads: Reads) -> Absence:
    """No line, although the value would have one: lost, never asked for, or not shown."""
    blind = _blind(log, reads.missing)
    if blind is not None:
        return blind
    version = next((p.version for p in reads.missing if p.version), log.bare_version)
    why = unread_because(name, version)
    if why is not None and not reads.found:
        return Absence(verdict="not effective", reason=why, lost_at="not a variable of this NCCL")
    owner = owner_of(name)
    if owner is not None:
        return Absence(
            verdict="unknown",
            reason=f"NCCL itself reads no {name}: it is {owner}, and a log of NCCL's does not show "
            "it",
        )
    who = ", ".join(label(process) for process in reads.missing[:4])
    if len(reads.missing) > 4:
        who += ", ..."
    if name in ALWAYS_READ or reads.found or _due(log, name):
        some = ": it reached some workers only" if reads.found else ""
        return Absence(
            verdict="not effective",
            reason=f"{len(reads.missing)} of {len(workers(log))} workers never read it ({who}): "
            f'NCCL prints "{name} set by environment" for each variable it finds, and there is no '
            f"such line{some}",
            lost_at="between the shell and the workers"
            if not reads.found
            else "on the way to some of the workers",
        )
    return _never_asked(log, name)


def _vias(log: NcclLog) -> set[str]:
    """Kinds of connections of all workers: P2P, SHM, NET."""
    return {
        transport.via.split("/")[0]
        for process in workers(log)
        for comm in process.comms
        for transport in comm.transports
    }


def _due(log: NcclLog, name: str) -> bool:
    """Whether a connection was made for which NCCL reads the variable."""
    return any(name in _READ_FOR.get(via, ()) for via in _vias(log))


def _never_asked(log: NcclLog, name: str) -> Absence:
    """A variable that NCCL reads only where it needs it."""
    vias = _vias(log)
    if vias and name.startswith(_NETWORK) and not vias & {"NET", "COLLNET"}:
        return Absence(
            verdict="inert",
            reason=f"it belongs to the network, and all connections here are "
            f"{' and '.join(sorted(vias))}: no worker's NCCL came to read it",
        )
    if vias == {"P2P"} and name.startswith(_SHARED):
        return Absence(
            verdict="inert",
            reason="it belongs to shared memory, and all connections here are P2P: no worker's "
            "NCCL came to read it",
        )
    return Absence(
        verdict="unknown",
        reason="no worker's NCCL printed it, but NCCL reads this variable only where it needs it: "
        "a missing line does not show that it was lost (`-- CMD --run` looks into the workers)",
    )


def _blind(log: NcclLog, missing: Sequence[ProcessLog]) -> Absence | None:
    """Why a missing line proves nothing, where the log itself is incomplete."""
    if not any(process.informative for process in missing):
        return Absence(
            verdict="unknown",
            reason=f"the log of {_who(missing)} holds a version or warnings only: run with "
            "NCCL_DEBUG=INFO",
        )
    if log.num_folded:
        return Absence(
            verdict="unknown",
            reason=f"Ray left {log.num_folded} equal lines of other workers out: start with "
            "RAY_DEDUP_LOGS=0, or NCCL_DEBUG_FILE with %h.%p",
        )
    unsure = [process for process in missing if env_logged(process) is None]
    if len(unsure) == len(missing):
        return Absence(
            verdict="unknown",
            reason='no "set by environment" line at all in the log of '
            f"{_who(unsure)}: add ENV to NCCL_DEBUG_SUBSYS",
        )
    unfinished = [
        process
        for process in missing
        if process.comms and not any(comm.complete for comm in process.comms)
    ]
    if unfinished:
        return Absence(
            verdict="unknown",
            reason=f'the log of {_who(unfinished)} ends before "Init COMPLETE": NCCL may have read '
            "it later",
        )
    return None


def _who(processes: Sequence[ProcessLog]) -> str:
    return ", ".join(label(process) for process in processes[:4])


def denied(log: NcclLog, name: str, asked: str | None = None) -> Absence | None:
    """A list in NCCL_ALGO or NCCL_PROTO that NCCL refuses, or that a logged choice contradicts."""
    if name not in LISTS:
        return None
    for process in workers(log):
        text = asked if asked is not None else process.environment.get(name)
        if text is None:
            continue
        found = _denied_in(process, name, text)
        if found is not None:
            return found
    return None


def _denied_in(process: ProcessLog, name: str, text: str) -> Absence | None:
    elements = LISTS[name]
    try:
        listed = parse_list(name, text, elements)
    except ValueError as error:
        if any(comm.complete for comm in process.comms):
            # before 2.24 unknown words are passed over
            return Absence(
                verdict="not effective",
                reason=f"{error}; this NCCL ({process.version or 'version not logged'}) passes "
                "over such words without a warning (2.24 and newer refuse to start)",
                lost_at="inside NCCL",
            )
        return Absence(
            verdict="not effective",
            reason=f"NCCL refuses it and makes no communicator: {error}",
            lost_at="inside NCCL",
        )
    if listed is None:
        return None
    allowed = {e.lower() for e, on in zip(elements, listed, strict=True) if on}
    for choice in process.choices:
        ran = choice.algo if name == "NCCL_ALGO" else choice.proto
        if choice.function != "AllReduce" or choice.algo == "SYMMETRIC":
            continue
        if ran.lower().replace("_", "") not in allowed:
            return Absence(
                verdict="not effective",
                reason=f"{label(process)} ran {choice.algo}/{choice.proto} for "
                f"{choice.size_bytes} bytes, which {name}={text} forbids: a tuner plugin or "
                "another library decides",
                evidence=(str(choice.evidence),),
                lost_at="inside NCCL",
            )
    return None


def level_off(log: NcclLog, environment: Mapping[str, str], reads: Reads) -> Absence | None:
    """NCCL_P2P_LEVEL while peer-to-peer is off: NCCL never looks at it."""
    if c_integer(environment.get("NCCL_P2P_DISABLE", "0")) != 1:
        return None
    if reads.name != "NCCL_P2P_LEVEL" or len(reads.missing) != len(workers(log)):
        return None
    return Absence(
        verdict="inert",
        reason="NCCL_P2P_DISABLE=1: with peer-to-peer off NCCL never looks at the level; all "
        "traffic goes through host memory",
        evidence=reads_of(log, "NCCL_P2P_DISABLE").evidence,
    )
