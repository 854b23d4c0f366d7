"""The communicator of a log under other peer-to-peer settings, by the topology that it prints.

Without a machine file the printed topology tells which path two GPUs have; NCCL's rule (default
level PXB; SYS for two GPUs on AMD) then says whether they use peer-to-peer.
"""

from functools import lru_cache

from model.nccl.communicator import communicator_on, p2p_rule, searched_graphs
from model.nccl.settings import NcclSettings
from model.nccl.topology import topology_from_log
from model.nccl.tuning import Communicator
from model.nccl.versions import Release


def rewired(
    comm: Communicator, lines: tuple[str, ...], settings: NcclSettings
) -> Communicator | None:
    """``comm``, logged with the topology ``lines``, as ``settings`` would have wired it.

    None where they wire it as it is. Raises ``ValueError`` where the topology is not printed, is
    damaged, or leaves the network only.
    """
    if not lines:
        raise ValueError("the log does not print the topology (NCCL_DEBUG_SUBSYS needs GRAPH)")
    multicast = comm.nvls is not None
    try:
        logged = _built(lines, comm.min_cc, comm.release, comm.settings, True, multicast)
    except ValueError:
        # the network only
        logged = None
    # what NCCL's rule allows and the log does not show, the driver refuses
    possible = logged is None or not (logged.transport == "P2P" and comm.transport == "SHM")
    if logged is not None and not possible:
        logged = _built(lines, comm.min_cc, comm.release, comm.settings, False, multicast)
    try:
        other = _built(lines, comm.min_cc, comm.release, settings, possible, multicast)
    except ValueError as error:
        raise ValueError(
            f"the topology that the log prints does not tell how the {comm.num_ranks} GPUs would "
            f"be wired then ({error})"
        ) from None
    same = logged is not None and (logged.ring, logged.tree, logged.transport) == (
        other.ring,
        other.tree,
        other.transport,
    )
    return None if same else other


@lru_cache(maxsize=64)
def _built(
    lines: tuple[str, ...],
    capability: int,
    release: Release,
    settings: NcclSettings,
    possible: bool,
    multicast: bool,
) -> Communicator:
    rule = p2p_rule(settings, possible=possible)
    topology = topology_from_log(lines, capability, rule)
    graphs = searched_graphs(topology, release, rule, multicast=multicast)
    return communicator_on(graphs, settings, release)
