"""What backends use of ``autotune.effect``: the logging they turn on, the failure they report."""

from collections.abc import Sequence
from pathlib import Path

from autotune.backends.base import tail
from autotune.effect.arrival import (
    OWNED_VARIABLES,
    environment_problems,
    library_problems,
    nccl_log_problems,
)
from autotune.nccl_log_types import NcclLog
from autotune.records import Failure

__all__ = [
    "OWNED_VARIABLES",
    "environment_problems",
    "library_problems",
    "nccl_log_environment",
    "nccl_log_problems",
    "nccl_summary",
    "not_effective",
]


def nccl_log_environment(prefix: Path, tuning: bool) -> dict[str, str]:
    """Variables that make each worker's NCCL log into a file of its own.

    %p is needed: without it all ranks truncate one file. ``tuning`` adds the choice of each call.
    """
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH" + (",TUNING" if tuning else ""),
        "NCCL_DEBUG_FILE": f"{prefix}.%h.%p.log",
    }


def not_effective(problems: Sequence[str]) -> Failure:
    """The failure of knobs whose settings did not arrive."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Failure(
        kind="setting_not_effective",
        stage="start",
        message=problems[0] + more,
        log_tail=tail("\n".join(problems)),
    )


def nccl_summary(log: NcclLog) -> dict[str, object]:
    """What NCCL chose, for the provenance: version, channels, transport, choices by size.

    Values that differ between ranks are listed; choices are rank 0's, as NCCL logs them.
    """
    comms = [comm for process in log.processes for comm in process.comms]
    choices = [
        {
            "bytes": choice.size_bytes,
            "algo": choice.algo,
            "proto": choice.proto,
            "channels": [choice.channel_low, choice.channel_high],
        }
        for process in log.processes
        for choice in process.choices
        if choice.function == "AllReduce"
    ]
    return {
        "versions": list(log.versions),
        "transports": sorted({comm.transport for comm in comms if comm.transport is not None}),
        "channels": sorted({c.coll_channels for c in comms if c.coll_channels is not None}),
        "allreduce_choices": sorted(choices, key=lambda choice: str(choice)),
        "warnings": sorted({w.text for process in log.processes for w in process.warnings}),
    }
