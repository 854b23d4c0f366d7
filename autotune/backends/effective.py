"""Proof that what was asked for took effect in every worker.

The environment is read inside each worker through C ``getenv``: a file, a launcher or a library
may have changed it between the shell and the worker.
"""

from collections.abc import Mapping, Sequence

from autotune.records import RankEnvironment
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
