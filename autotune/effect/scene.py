"""Where a prediction of effects is made: the communicator behind a log, or of a machine file.

A log never says how fast its links are. Times are predicted for a machine file that is given, or
for a known one whose NCCL search gives the very communicator that the log shows.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.effect.by_size import Scene
from model.machine import Machine, load_machine
from model.nccl.communicator import communicator_for
from model.nccl.settings import NcclSettings
from model.nccl.tuning import Communicator
from model.nccl.versions import release_for

if TYPE_CHECKING:
    from autotune.nccl_log_types import CommLog, NcclLog, ProcessLog

MACHINES = Path(__file__).parents[2] / "studies" / "machines"


def scene_of_machine(machine: Machine, num_ranks: int, version: str) -> Scene:
    """The communicator of all ranks of a machine under no settings.

    Raises ``ValueError`` for an unknown version or too few GPUs.
    """
    comm = communicator_for(machine, num_ranks, NcclSettings(), version)
    return Scene(comm=comm, machine=machine)


def scene_of_log(
    log: "NcclLog", process: "ProcessLog", comm: "CommLog", machine: Machine | None
) -> Scene | str:
    """The scene of one logged communicator, or why there is none (one clause)."""
    # a machine's scene needs no reader of logs
    from autotune.selector_check import CAPABILITIES
    from autotune.selector_log import LoggedCommunicator

    version = process.version or (log.versions[0] if len(log.versions) == 1 else None)
    if version is None:
        return "the log does not show the NCCL version (NCCL_DEBUG_SUBSYS needs INIT)"
    try:
        release = release_for(version)
    except ValueError:
        return f"the choices of NCCL {version.split('+')[0]} are not known, only 2.27.3 to 2.30.7"
    try:
        settings = NcclSettings.from_env(process.environment)
    except ValueError as error:
        return str(error)
    try:
        candidates = [
            LoggedCommunicator.of(log, comm, settings, release, capability)
            for capability in CAPABILITIES
        ]
    except ValueError as error:
        if machine is not None:
            return _scene_of_summary(machine, comm, settings, release.name)
        return (
            f"{error} (NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING shows them, or name the --machine)"
        )
    best = min(candidates, key=lambda candidate: candidate.misses)
    if machine is not None:
        problem = _differs(machine, best.comm, settings)
        if problem is not None:
            return f"machine {machine.name} is not the host of the log: {problem}"
        return Scene(comm=best.comm, machine=machine, topology=comm.topology)
    fitting = [m for m in _known_machines() if _differs(m, best.comm, settings) is None]
    # a host that forces P2P off is the same communicator as one with NCCL_P2P_DISABLE=1
    found = fitting[0] if fitting else None
    return Scene(comm=best.comm, machine=found, topology=comm.topology)


def _scene_of_summary(
    machine: Machine, comm: "CommLog", settings: NcclSettings, version: str
) -> Scene | str:
    """The scene of a machine, where a log without GRAPH shows no more than channels and paths."""
    if comm.num_ranks is None or machine.gpu is None or machine.gpu.count < comm.num_ranks:
        return f"machine {machine.name} has not the {comm.num_ranks} GPUs of the log"
    try:
        ours = communicator_for(
            machine, comm.num_ranks, settings, version, multicast=bool(comm.nvls_channels)
        )
    except ValueError as error:
        return f"machine {machine.name}: {error}"
    for what, mine, theirs in (
        ("channels", ours.num_channels, comm.coll_channels),
        ("transport", ours.transport, comm.transport),
    ):
        if theirs is not None and mine != theirs:
            return f"machine {machine.name} is not the host of the log: {what} {mine}, not {theirs}"
    return Scene(comm=ours, machine=machine)


def _differs(machine: Machine, comm: Communicator, settings: NcclSettings) -> str | None:
    """What a machine's communicator has otherwise than the logged one, or None."""
    if machine.gpu is None:
        return "it has no GPU"
    if machine.gpu.count < comm.num_ranks:
        return f"{machine.gpu.count} GPUs, {comm.num_ranks} ranks"
    try:
        ours = communicator_for(
            machine, comm.num_ranks, settings, comm.release.name, multicast=comm.nvls is not None
        )
    except ValueError as error:
        return str(error)
    if ours.transport != comm.transport:
        return f"transport {ours.transport}, logged {comm.transport}"
    for name, mine, theirs in (("ring", ours.ring, comm.ring), ("tree", ours.tree, comm.tree)):
        a = (mine.num_channels, round(mine.bw_intra, 2), mine.type_intra)
        b = (theirs.num_channels, round(theirs.bw_intra, 2), theirs.type_intra)
        if a != b:
            return f"{name} search {a}, logged {b} (channels, GB/s, path type)"
    if ours.num_channels != comm.num_channels:
        return f"{ours.num_channels} channels, logged {comm.num_channels}"
    if ours.min_cc // 10 != comm.min_cc // 10:
        return f"compute capability {ours.min_cc}, logged tables of {comm.min_cc}"
    return None


@cache
def _known_machines() -> tuple[Machine, ...]:
    return tuple(_loaded())


def _loaded() -> Iterator[Machine]:
    for path in sorted(MACHINES.glob("*.yaml")):
        machine = load_machine(path)
        if machine.gpu is not None:
            yield machine
