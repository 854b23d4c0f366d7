"""Did settings arrive: the environment inside each worker, and what its NCCL read.

The environment is read inside each worker through C ``getenv``: a file, a launcher or a library
may have changed it between the shell and the worker. NCCL's log then proves that NCCL used it.
"""

from collections.abc import Mapping, Sequence

from autotune.effect.reads import same_value
from autotune.nccl_log_types import NcclLog, ProcessLog
from autotune.records import RankEnvironment
from model.nccl.settings import c_integer
from model.spec import KNOB_FIELDS

#: NCCL variable -> the knob that owns it
OWNED_VARIABLES: Mapping[str, str] = {
    "NCCL_ALGO": "nccl.algo",
    "NCCL_PROTO": "nccl.proto",
    "NCCL_MIN_NCHANNELS": "nccl.min_channels",
    "NCCL_MAX_NCHANNELS": "nccl.max_channels",
    "NCCL_BUFFSIZE": "nccl.buffsize",
    "NCCL_NTHREADS": "nccl.nthreads",
    "NCCL_P2P_LEVEL": "nccl.p2p_level",
}
assert set(OWNED_VARIABLES.values()) <= set(KNOB_FIELDS)


def environment_problems(
    expected: Mapping[str, str], ranks: Sequence[RankEnvironment], num_ranks: int
) -> list[str]:
    """What differs between the variables asked for and those in the workers, one line each.

    A variable that a knob owns and nobody asked for must be absent.
    """
    problems = []
    if len(ranks) != num_ranks:
        problems.append(f"{len(ranks)} of {num_ranks} workers told their environment")
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        for name in sorted({*OWNED_VARIABLES, *expected}):
            asked, found = expected.get(name), rank.environment.get(name)
            if asked == found:
                continue
            knob = OWNED_VARIABLES.get(name, name)
            if asked is None:
                problems.append(f"rank {rank.rank} has {name}={found}, but {knob} was left to NCCL")
            else:
                state = "has no" if found is None else f"has {name}={found} instead of"
                problems.append(f"rank {rank.rank} {state} {name}={asked} ({knob})")
    return problems


def library_problems(ranks: Sequence[RankEnvironment]) -> list[str]:
    """Workers that loaded different NCCL libraries, one line."""
    versions = {rank.nccl_version for rank in ranks if rank.nccl_version is not None}
    libraries = {rank.nccl_library for rank in ranks if rank.nccl_library is not None}
    if len(versions) > 1 or len(libraries) > 1:
        return [f"workers loaded different NCCL libraries: {sorted(libraries)} {sorted(versions)}"]
    return []


def nccl_log_problems(
    expected: Mapping[str, str], ranks: Sequence[RankEnvironment], log: NcclLog
) -> list[str]:
    """Settings that a worker's NCCL did not read although they were asked for, one line each.

    The environment proves that a value arrived; this proves that NCCL used it: a library that
    caches, a configuration file or a plugin may stand between the two.
    """
    problems = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        process = process_of(rank, log)
        if process is None:
            problems.append(f"rank {rank.rank} (pid {rank.pid}) wrote no NCCL log")
            continue
        read = process.environment
        for name, asked in sorted(expected.items()):
            if level_is_moot(name, rank.environment):
                # NCCL never looks at the level then; it is inert, not lost
                continue
            if name not in read:
                problems.append(f"rank {rank.rank}: NCCL never read {name}={asked}")
            elif not same_value(name, asked, read[name]):
                problems.append(
                    f"rank {rank.rank}: NCCL read {name}={read[name]} instead of {asked}"
                )
    return problems


def level_is_moot(name: str, environment: Mapping[str, str]) -> bool:
    """Whether ``name`` is the peer-to-peer level while peer-to-peer is off."""
    off = c_integer(environment.get("NCCL_P2P_DISABLE", "0")) == 1
    return name == "NCCL_P2P_LEVEL" and off


def process_of(rank: RankEnvironment, log: NcclLog) -> ProcessLog | None:
    """The log of a worker, by process id; by rank where the ids are of another namespace."""
    for process in log.processes:
        if process.pid == rank.pid:
            return process
    for process, _ in log.by_rank(rank.rank):
        return process
    return None
