"""One communicator of a log while it fills up."""

import re
from dataclasses import dataclass, field

from autotune import nccl_log_types as t
from autotune.nccl_log_types import Evidence


@dataclass
class CommBuilder:
    """Fills up to a ``CommLog``."""

    evidence: Evidence
    comm: str | None = None
    comm_id: str | None = None
    rank: int | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    cuda_dev: int | None = None
    bus_id: str | None = None
    complete: bool = False
    coll_channels: int | None = None
    nvls_channels: int | None = None
    p2p_channels: int | None = None
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ring_neighbours: dict[int, tuple[int, int]] = field(default_factory=dict)
    trees: dict[str, None] = field(default_factory=dict)
    graphs: list[t.GraphSearch] = field(default_factory=list)
    transports: dict[tuple[int, int, str], tuple[set[int], Evidence]] = field(default_factory=dict)
    enabled: dict[str, t.EnabledRow] = field(default_factory=dict)
    model: dict[tuple[str, str, str], t.ModelEntry] = field(default_factory=dict)
    max_threads: dict[tuple[str, str], int] = field(default_factory=dict)
    thread_thresholds: str | None = None
    topology: list[str] = field(default_factory=list)
    topology_open: bool = False
    tuner: str | None = None
    #: of a split communicator: the parent's group, number of the split, colour
    split: tuple[str, str, str] | None = None
    #: algorithms of the block of the model table being printed
    block: tuple[str, ...] = ()

    @property
    def group(self) -> str | None:
        """The same text on every rank: the id, or what it was split from and how."""
        return self.comm_id or (None if self.split is None else "/".join(self.split))

    def build(self) -> t.CommLog:
        """The finished, frozen form."""
        return t.CommLog(
            comm=self.comm,
            comm_id=self.comm_id,
            group=self.group,
            rank=self.rank,
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
            cuda_dev=self.cuda_dev,
            bus_id=self.bus_id,
            complete=self.complete,
            coll_channels=self.coll_channels,
            nvls_channels=self.nvls_channels,
            p2p_channels=self.p2p_channels,
            rings=tuple(self.rings[c] for c in sorted(self.rings)),
            ring_neighbours=tuple(self.ring_neighbours[c] for c in sorted(self.ring_neighbours)),
            trees=tuple(self.trees),
            graphs=tuple(self.graphs),
            transports=tuple(
                t.Transport(source, target, via, len(channels), evidence)
                for (source, target, via), (channels, evidence) in self.transports.items()
            ),
            enabled=tuple(self.enabled.values()),
            model=tuple(self.model.values()),
            max_threads=dict(self.max_threads),
            thread_thresholds=self.thread_thresholds,
            topology=tuple(self.topology),
            tuner=self.tuner,
            evidence=self.evidence,
        )


def enabled_row(
    line: str, protocols: tuple[str, ...], algorithms: tuple[str, ...], evidence: Evidence
) -> t.EnabledRow | None:
    """One line of the "Enabled NCCL Func/Proto/Algo Matrix", or None if it is damaged."""
    parts = [part.split() for part in line.split("|")[-3:]]
    if len(parts) != 3 or not parts[0]:
        return None
    # a launcher's prefix may touch the name
    name = re.search(r"\w+$", parts[0][-1])
    if name is None:
        return None
    if len(parts[1]) != len(protocols) or len(parts[2]) != len(algorithms):
        return None
    if not all(word in "012" for word in (*parts[1], *parts[2])):
        return None
    return t.EnabledRow(
        name[0],
        dict(zip(protocols, map(int, parts[1]), strict=True)),
        dict(zip(algorithms, map(int, parts[2]), strict=True)),
        evidence,
    )
