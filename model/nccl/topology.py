"""NCCL's picture of one host: NUMA nodes, PCIe switches, GPUs, an NVLink switch, and the paths.

Built from a machine file or from the topology NCCL prints into its log. Bandwidths are those NCCL
assumes (GB/s = 10^9 bytes per second), not what the links reach. Order matters: NCCL's search
takes links and GPUs in order, so the order here is NCCL's.
Source: NVIDIA/nccl 2.27 to 2.30, src/graph/topo.cc and paths.cc (read, facts only).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from model.machine import Machine
from model.nccl import paths
from model.nccl.paths import LOC, NET, NVB, NVL, PHB, PIX, PXB, SYS

_LINK_PATH = {"LOC": LOC, "NVL": NVL, "PCI": PIX, "SYS": SYS}
_UNREACHED = paths.DIS


@dataclass(eq=False, slots=True)
class TopoNode:
    """One device; ``links`` are in NCCL's order."""

    kind: str
    index: int
    links: "list[TopoLink]" = field(default_factory=list)
    #: by kind of target, one path per device of that kind
    paths: "dict[str, list[Path]]" = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class TopoLink:
    """One direction of a link."""

    kind: str
    target: TopoNode
    bandwidth: float


@dataclass(eq=False, slots=True)
class Path:
    """Links from one device to another; ``rank`` is its type in ``paths.PATH_TYPES``."""

    links: tuple[TopoLink, ...]
    bandwidth: float
    rank: int


@dataclass(frozen=True, slots=True)
class P2pRule:
    """Up to which path GPUs may write each other's memory; None: NCCL's default."""

    level: int | None
    #: the driver allows peer access at all
    possible: bool = True
    shm: bool = True


class NcclTopology:
    """NCCL's topology of the GPUs of one communicator on one host."""

    def __init__(self, cpu_vendor: str, cpu_generation: str | None, min_cc: int) -> None:
        self.cpu_vendor, self.cpu_generation, self.min_cc = cpu_vendor, cpu_generation, min_cc
        self.nodes: dict[str, list[TopoNode]] = {"GPU": [], "PCI": [], "NVS": [], "CPU": []}

    @property
    def gpus(self) -> list[TopoNode]:
        """GPU nodes in order; the index is the rank."""
        return self.nodes["GPU"]

    def add(self, kind: str) -> TopoNode:
        """A new device."""
        node = TopoNode(kind, len(self.nodes[kind]))
        self.nodes[kind].append(node)
        return node

    @staticmethod
    def connect(a: TopoNode, b: TopoNode, kind: str, bandwidth: float) -> None:
        """Both directions; equal links add up, faster links come first."""
        for source, target in ((a, b), (b, a)):
            for link in source.links:
                if link.target is target and link.kind == kind:
                    break
            else:
                link = TopoLink(kind, target, 0.0)
                source.links.append(link)
            link.bandwidth += bandwidth
            source.links.remove(link)
            place = sum(1 for other in source.links if other.bandwidth >= link.bandwidth)
            source.links.insert(place, link)

    def finish(self, rule: P2pRule) -> "NcclTopology":
        """Join the NUMA nodes, order the links and compute all paths.

        Raises ``ValueError`` when the socket link is unknown, and when neither peer access nor
        shared memory joins two GPUs (their traffic would go through the network).
        """
        cpus = self.nodes["CPU"]
        if len(cpus) > 1:
            rate = paths.socket_gb_per_s(self.cpu_vendor, self.cpu_generation)
            for i, a in enumerate(cpus):
                for b in cpus[i + 1 :]:
                    self.connect(a, b, "SYS", rate)
        for cpu in cpus:
            _uplinks_last(cpu, None)
        for kind in ("CPU", "GPU", "NVS"):
            for node in self.nodes[kind]:
                self._set_paths(node)
        self._apply(rule)
        return self

    def path(self, a: int, b: int) -> Path:
        """The path from one GPU to another, by rank."""
        return self.gpus[a].paths["GPU"][b]

    def min_type(self) -> int:
        """Rank of the nearest path between two GPUs."""
        return min((p.rank for p in self._pairs()), default=SYS)

    def max_type(self) -> int:
        """Rank of the farthest path between two GPUs."""
        return max((p.rank for p in self._pairs()), default=LOC)

    def max_bandwidth(self) -> float:
        """The fastest path between two GPUs, GB/s: what one channel may reach."""
        return max((p.bandwidth for p in self._pairs()), default=0.0)

    def total_bandwidth(self) -> float:
        """The fastest GPU's links, GB/s: PCIe or all NVLinks, whichever is more."""
        most = 0.0
        for gpu in self.gpus:
            nvlink = sum(link.bandwidth for link in gpu.links if link.kind == "NVL")
            pcie = [link.bandwidth for link in gpu.links if link.kind == "PCI"]
            most = max(most, nvlink, *(pcie[-1:] or [0.0]))
        return most

    def split_nvlink(self) -> bool:
        """Two groups of NVLink-joined GPUs with something slower between."""
        domain = list(range(len(self.gpus)))
        for a in range(len(domain)):
            for b in range(a + 1, len(domain)):
                if self.path(a, b).rank == NVL:
                    domain[b] = domain[a]
        return sum(domain.count(d) > 1 for d in range(len(domain))) == 2

    def p2p(self, a: int, b: int, rule: P2pRule) -> bool:
        """Whether two GPUs use peer access."""
        level = rule.level
        if level is None:
            level = SYS if self.cpu_vendor == "amd" and len(self.gpus) <= 2 else PXB
        return self.path(a, b).rank <= level and rule.possible

    def _pairs(self) -> list[Path]:
        count = range(len(self.gpus))
        return [self.path(a, b) for a in count for b in count if a != b]

    def _set_paths(self, base: TopoNode) -> None:
        """Breadth first from ``base``: every device's path to it, the widest of the shortest."""
        for nodes in self.nodes.values():
            for node in nodes:
                count = len(self.nodes[base.kind])
                if base.kind not in node.paths:
                    node.paths[base.kind] = [Path((), 0.0, _UNREACHED) for _ in range(count)]
        base.paths[base.kind][base.index] = Path((), paths.LOCAL_GB_PER_S, LOC)
        front = [base]
        while front:
            following: list[TopoNode] = []
            for node in front:
                path = node.paths[base.kind][base.index]
                for link in node.links:
                    far = link.target
                    old = far.paths[base.kind][base.index]
                    bandwidth = min(path.bandwidth, link.bandwidth)
                    through_gpu = node is not base and node.kind == "GPU"
                    if through_gpu and (
                        link.kind != "NVL" or far.kind != "GPU" or len(path.links) > 1
                    ):
                        continue
                    longer = old.bandwidth == 0 or len(old.links) > len(path.links)
                    if not (longer and old.bandwidth < bandwidth):
                        continue
                    back = next(x for x in far.links if x.target is node and x.kind == link.kind)
                    rank = _step_rank(node, link, path, len(path.links) + 1)
                    far.paths[base.kind][base.index] = Path(
                        (back, *path.links), bandwidth, max(path.rank, rank)
                    )
                    if far not in following:
                        following.append(far)
            front = following

    def _apply(self, rule: P2pRule) -> None:
        """Traffic without peer access goes through the receiver's NUMA node."""
        for target in self.gpus:
            for source in self.gpus:
                if self.p2p(source.index, target.index, rule):
                    continue
                if source is target:
                    continue
                if not rule.shm:
                    raise ValueError(
                        f"GPUs {source.index} and {target.index} have neither peer access nor "
                        "shared memory (NCCL_SHM_DISABLE=1): NCCL goes through the network, "
                        "which the search does not model"
                    )
                cpu = self._local_cpu(target)
                first, second = source.paths["CPU"][cpu.index], cpu.paths["GPU"][target.index]
                source.paths["GPU"][target.index] = Path(
                    first.links + second.links,
                    min(first.bandwidth, second.bandwidth),
                    min(max(first.rank, second.rank), NET),
                )

    def _local_cpu(self, gpu: TopoNode) -> TopoNode:
        reached = [cpu for cpu in self.nodes["CPU"] if gpu.paths["CPU"][cpu.index].links]
        return min(reached, key=lambda cpu: len(gpu.paths["CPU"][cpu.index].links))


def _step_rank(node: TopoNode, link: TopoLink, path: Path, num_links: int) -> int:
    rank = _LINK_PATH[link.kind]
    if node.kind == "PCI" and link.target.kind == "PCI":
        rank = PXB
    if link.kind == "PCI" and "CPU" in (node.kind, link.target.kind):
        rank = PHB
    if node.kind == "GPU" and path.rank == NVL and rank == NVL and num_links > 1:
        rank = NVB
    return rank


def _uplinks_last(node: TopoNode, up: TopoNode | None) -> None:
    if up is not None:
        link = next(x for x in node.links if x.target is up)
        node.links.remove(link)
        node.links.append(link)
    for link in list(node.links):
        if link.kind == "PCI" and link.target is not up:
            _uplinks_last(link.target, node)


def topology_of(machine: Machine, num_ranks: int, rule: P2pRule) -> NcclTopology:
    """NCCL's topology of the first ``num_ranks`` GPUs of a machine.

    Raises ``ValueError`` for a machine without so many GPUs or an unknown socket link.
    """
    if machine.gpu is None or not 1 <= num_ranks <= machine.gpu.count:
        have = 0 if machine.gpu is None else machine.gpu.count
        raise ValueError(f"machine {machine.name!r} has {have} GPUs, not {num_ranks} for NCCL")
    topo = NcclTopology(machine.cpu.vendor, machine.cpu.generation, machine.gpu.cc)
    graph, kinds = machine.topology.host_graph, machine.topology.kinds
    used = {f"gpu{i}" for i in range(num_ranks)}
    found: dict[str, TopoNode] = {}

    def holds(name: str, came_from: str) -> bool:
        return name in used or any(
            holds(far, name)
            for far in graph.neighbors(name)
            if far != came_from and kinds[far] in ("gpu", "switch", "root_port")
        )

    def attach(name: str, came_from: str, parent: TopoNode) -> None:
        if kinds[name] == "root_port":
            # NCCL does not count root ports: what hangs on one hangs on the NUMA node
            for far in graph.neighbors(name):
                if far != came_from and kinds[far] in ("gpu", "switch") and holds(far, name):
                    attach(far, name, parent)
            return
        link = graph.edge(came_from, name)
        # the topology's check: every PCIe link has both
        assert link.pcie_gen is not None
        assert link.pcie_width is not None
        node = topo.add("GPU" if kinds[name] == "gpu" else "PCI")
        found[name] = node
        if kinds[name] == "switch":
            for far in graph.neighbors(name):
                if far != came_from and kinds[far] in ("gpu", "switch") and holds(far, name):
                    attach(far, name, node)
        topo.connect(node, parent, "PCI", paths.pcie_gb_per_s(link.pcie_gen, link.pcie_width))

    for name, kind in kinds.items():
        doors = [
            far
            for far in graph.neighbors(name)
            if kind == "socket" and kinds[far] == "root_port" and holds(far, name)
        ]
        if doors:
            cpu = topo.add("CPU")
            for door in doors:
                attach(door, name, cpu)
    order = sorted(used, key=lambda name: int(name[3:]))
    topo.nodes["GPU"] = [found[name] for name in order]
    for index, gpu in enumerate(topo.gpus):
        gpu.index = index
    _add_nvlinks(topo, machine, found, used)
    return topo.finish(rule)


def _add_nvlinks(
    topo: NcclTopology, machine: Machine, found: dict[str, TopoNode], used: set[str]
) -> None:
    one = paths.nvlink_gb_per_s(topo.min_cc)
    switch: TopoNode | None = None
    for link in machine.topology.links:
        if link.kind != "nvlink":
            continue
        ends = [end for end in (link.a, link.b) if machine.topology.kinds[end] == "gpu"]
        if not used.issuperset(ends):
            continue
        # NCCL counts whole links of its own nominal rate
        bandwidth = max(1, round(link.gb_per_s / one)) * one
        if len(ends) == 2:
            topo.connect(found[ends[0]], found[ends[1]], "NVL", bandwidth)
        else:
            switch = switch or topo.add("NVS")
            topo.connect(found[ends[0]], switch, "NVL", bandwidth)


_CPU = re.compile(r"CPU/\S+ \((\d+)/(\d+)/(-?\d+)\)")
_LINK = re.compile(r"( *)\+ (\w+)\[([\d.]+)\] - (\w+)/(\S+)(?: \((\w+))?")
_VENDORS = {1: "intel", 2: "amd"}


def topology_from_log(lines: Sequence[str], min_cc: int, rule: P2pRule) -> NcclTopology:
    """NCCL's topology from the lines between "=== System" and "=====" of its log.

    Raises ``ValueError`` when they show no GPU or no processor.
    """
    heads = [match for line in lines if (match := _CPU.match(line))]
    if not heads:
        raise ValueError("the printed topology shows no processor")
    arch, vendor, model = map(int, heads[0].groups())
    name = "arm" if arch == 3 else _VENDORS.get(vendor, "other") if arch == 1 else "other"
    topo = NcclTopology(name, paths.INTEL_MODEL_NUMBER.get(model), min_cc)
    #: (column, node) from the processor down to the last device
    stack: list[tuple[int, TopoNode]] = []
    links: list[tuple[TopoNode, TopoNode, float]] = []
    gpus: list[tuple[int, TopoNode]] = []
    nvlinks: list[tuple[TopoNode, str, float]] = []
    by_id: dict[str, TopoNode] = {}
    for line in lines:
        if _CPU.match(line):
            stack = [(-1, topo.add("CPU"))]
            continue
        match = _LINK.match(line)
        if match is None or not stack:
            continue
        column, kind, target = len(match[1]), match[2], match[4]
        while len(stack) > 1 and stack[-1][0] >= column:
            stack.pop()
        parent, bandwidth = stack[-1][1], float(match[3])
        if kind == "PCI" and target in ("GPU", "DEV", "PCI"):
            node = topo.add("PCI" if target == "PCI" else "GPU")
            links.append((node, parent, bandwidth))
            if target != "PCI":
                by_id[match[5]] = node
                rank = match[6] if target == "GPU" and (match[6] or "").isdigit() else None
                gpus.append((len(gpus) if rank is None else int(rank), node))
            stack.append((column, node))
        elif kind == "NVL" and target in ("GPU", "DEV", "NVS"):
            nvlinks.append((parent, "NVS" if target == "NVS" else match[5], bandwidth))
    if not gpus:
        raise ValueError("the printed topology shows no GPU")
    topo.nodes["GPU"] = [node for _, node in sorted(gpus, key=lambda pair: pair[0])]
    for index, gpu in enumerate(topo.gpus):
        gpu.index = index
    for node, parent, bandwidth in links:
        topo.connect(node, parent, "PCI", bandwidth)
    for node, end, bandwidth in nvlinks:
        if end == "NVS":
            switch = topo.nodes["NVS"][0] if topo.nodes["NVS"] else topo.add("NVS")
            topo.connect(node, switch, "NVL", bandwidth)
        elif end in by_id and topo.gpus.index(node) < topo.gpus.index(by_id[end]):
            topo.connect(node, by_id[end], "NVL", bandwidth)
    return topo.finish(rule)
