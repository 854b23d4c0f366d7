"""The topology of one host as a graph: what is joined to what, how fast and how far.

Nodes are GPUs (their ports), PCIe switches, root ports, CPU sockets, host memory, NVLink switches
and NICs. A link carries a rate per direction in GB/s (10^9 bytes per second) and a one-way latency
in us. PCIe is a tree, so a cycle of PCIe links is refused; sockets and NVLinks may form a mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from model.graph import Graph

NodeKind = Literal["gpu", "switch", "root_port", "socket", "host_memory", "nvswitch", "nic"]
LinkKind = Literal["pcie", "fabric", "socket", "memory", "nvlink"]
#: NCCL's names of a path between two GPUs, nearest first
PathType = Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"]

#: which kinds of node a kind of link joins ("fabric" is a root port's way into its socket)
LINK_ENDS: Mapping[str, tuple[frozenset[str], ...]] = {
    "pcie": tuple(
        frozenset(pair)
        for pair in (
            ("gpu", "switch"),
            ("gpu", "root_port"),
            ("nic", "switch"),
            ("nic", "root_port"),
            ("switch", "switch"),
            ("switch", "root_port"),
        )
    ),
    "fabric": (frozenset(("root_port", "socket")),),
    "socket": (frozenset(("socket",)),),
    "memory": (frozenset(("socket", "host_memory")),),
    "nvlink": (frozenset(("gpu",)), frozenset(("gpu", "nvswitch"))),
}
#: plausible rates, GB/s per direction: from a Gen1 x1 lane to what 2030 may bring
RATE_RANGE_GB_PER_S: Mapping[str, tuple[float, float]] = {
    "pcie": (0.2, 256.0),
    "fabric": (0.2, 512.0),
    "socket": (1.0, 1000.0),
    "memory": (1.0, 4000.0),
    "nvlink": (10.0, 4000.0),
}
#: PCIe signalling after encoding, GB/s per lane and direction, by generation
PCIE_LANE_GB_PER_S: Mapping[int, float] = {
    1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563,
}  # fmt: skip


class Schema(BaseModel):
    """Base of the machine schema: immutable, an unknown key is refused."""

    # a schema inside another is built as part of that one, never alone
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Node(Schema):
    """One device; ``id`` is unique. GPU ids are gpu0, gpu1, ... in rank order."""

    id: str
    kind: NodeKind


class Link(Schema):
    """One full-duplex link. ``gb_per_s`` is what data can reach per direction, not the signalling
    rate; ``latency_us`` its one-way share of a hop. PCIe links also carry generation and width."""

    a: str
    b: str
    kind: LinkKind
    gb_per_s: float
    latency_us: float
    pcie_gen: int | None = None
    pcie_width: int | None = None

    @field_validator("pcie_gen")
    @classmethod
    def _known_generation(cls, gen: int | None) -> int | None:
        if gen is not None and gen not in PCIE_LANE_GB_PER_S:
            raise ValueError(f"{gen} is no PCIe generation; known: 1 to 6")
        return gen

    @field_validator("pcie_width")
    @classmethod
    def _known_width(cls, width: int | None) -> int | None:
        if width is not None and width not in (1, 2, 4, 8, 16):
            raise ValueError(f"{width} lanes is no PCIe width; known: 1, 2, 4, 8, 16 lanes")
        return width

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        low, high = RATE_RANGE_GB_PER_S[self.kind]
        here = f"{self.kind} link {self.a}-{self.b}"
        check_unit(f"{here}: gb_per_s", self.gb_per_s, low, high, "GB/s (10^9 bytes per second)")
        check_unit(f"{here}: latency_us", self.latency_us, 0.0, 50.0, "us (microseconds)")
        if (self.pcie_gen is None) != (self.pcie_width is None):
            raise ValueError(f"{here}: pcie_gen and pcie_width go together (generation, lanes)")
        if self.pcie_gen is not None and self.pcie_width is not None:
            if self.kind != "pcie":
                raise ValueError(f"{here}: pcie_gen and pcie_width belong to pcie links only")
            most = PCIE_LANE_GB_PER_S[self.pcie_gen] * self.pcie_width
            if self.gb_per_s > most * 1.01:
                raise ValueError(
                    f"{here}: gb_per_s {self.gb_per_s:g} GB/s is above the {most:.1f} GB/s per "
                    f"direction that Gen{self.pcie_gen} x{self.pcie_width} can signal"
                )
        elif self.kind == "pcie":
            raise ValueError(f"{here}: pcie_gen (generation) and pcie_width (lanes) are required")
        return self


def check_unit(field: str, value: float, low: float, high: float, unit: str) -> None:
    """Raise ``ValueError`` naming field and unit unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{field} {value:g} is outside {low:g}..{high:g}; the unit is {unit}")


class Topology(Schema):
    """The graph of one host, checked: unique nodes, fitting links, every GPU reaches a socket."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        kinds: dict[str, str] = {}
        for node in self.nodes:
            if node.id in kinds:
                raise ValueError(f"topology.nodes: id {node.id!r} occurs twice")
            kinds[node.id] = node.kind
        if "socket" not in kinds.values():
            raise ValueError("topology.nodes: a host has at least one node of kind socket")
        expected = [f"gpu{i}" for i in range(sum(kind == "gpu" for kind in kinds.values()))]
        found = sorted((n for n, kind in kinds.items() if kind == "gpu"), key=lambda n: (len(n), n))
        if found != expected:
            raise ValueError(f"topology.nodes: GPU ids {found} must be gpu0, gpu1, ...")
        seen: set[tuple[frozenset[str], str]] = set()
        for i, link in enumerate(self.links):
            here = f"topology.links[{i}] ({link.a}-{link.b})"
            for end in (link.a, link.b):
                if end not in kinds:
                    raise ValueError(f"{here}: node {end!r} is not in topology.nodes")
            pair = frozenset((link.a, link.b))
            if len(pair) == 1 or (pair, link.kind) in seen:
                raise ValueError(f"{here}: a {link.kind} link joins two nodes, once")
            seen.add((pair, link.kind))
            if frozenset((kinds[link.a], kinds[link.b])) not in LINK_ENDS[link.kind]:
                raise ValueError(
                    f"{here}: a {link.kind} link cannot join {kinds[link.a]} and {kinds[link.b]}"
                )
        tree = self.host_graph.without(n for n, kind in kinds.items() if kind == "socket")
        cycle = tree.cycle()
        if cycle is not None:
            raise ValueError(
                f"topology.links: PCIe is a tree, but {' - '.join(cycle)} form a cycle"
            )
        sockets = [n for n, kind in kinds.items() if kind == "socket"]
        for part in tree.parts():
            doors = [n for n in part for s in sockets if self.host_graph.has_edge(n, s)]
            roots = {s for n in part for s in sockets if self.host_graph.has_edge(n, s)}
            if len(doors) > 1:
                raise ValueError(
                    f"topology.links: PCIe is a tree, but {sorted(part)} reach sockets "
                    f"{sorted(roots)} over {len(doors)} ways"
                )
        reached = self.host_graph.parents_from(sockets[0])
        for name, kind in kinds.items():
            if kind != "nvswitch" and name not in reached:
                raise ValueError(f"topology: {kind} {name!r} is disconnected from {sockets[0]!r}")
            if kind == "nvswitch" and not any(name in (k.a, k.b) for k in self.links):
                raise ValueError(f"topology: nvswitch {name!r} is disconnected")
        return self

    @cached_property
    def kinds(self) -> Mapping[str, NodeKind]:
        """Kind of each node, by id."""
        return {node.id: node.kind for node in self.nodes}

    @cached_property
    def host_graph(self) -> Graph[Link]:
        """Everything but NVLink."""
        return self._graph(lambda link: link.kind != "nvlink")

    @cached_property
    def nvlink_graph(self) -> Graph[Link]:
        """NVLinks only."""
        return self._graph(lambda link: link.kind == "nvlink")

    def _graph(self, keep: Callable[[Link], bool]) -> Graph[Link]:
        graph: Graph[Link] = Graph(node.id for node in self.nodes)
        for link in filter(keep, self.links):
            graph.add_edge(link.a, link.b, link)
        return graph

    @property
    def num_gpus(self) -> int:
        """Number of GPU nodes."""
        return sum(node.kind == "gpu" for node in self.nodes)

    def host_path(self, a: str, b: str) -> tuple[str, ...]:
        """Node ids from ``a`` to ``b`` without NVLink, fewest links first."""
        self._known(a, b)
        return self.host_graph.path(a, b)

    def links_along(self, path: tuple[str, ...], nvlink: bool = False) -> Iterator[Link]:
        """The links of a path of node ids."""
        graph = self.nvlink_graph if nvlink else self.host_graph
        for a, b in pairwise(path):
            yield graph.edge(a, b)

    def path_type(self, gpu_a: int, gpu_b: int) -> PathType:
        """The path between two GPUs in NCCL's terms.

        NVL over NVLink, PIX through one PCIe switch, PXB through several, PHB through a host
        bridge (root port) of one socket, SYS between sockets. Raises ``ValueError`` for a GPU
        that the topology does not have.
        """
        a, b = f"gpu{gpu_a}", f"gpu{gpu_b}"
        self._known(a, b)
        if a == b:
            return "LOC"
        hops = self.nvlink_path(a, b)
        if hops is not None:
            return "NVL"
        inner = [self.kinds[n] for n in self.host_path(a, b)[1:-1]]
        if inner.count("socket") > 1:
            return "SYS"
        if "socket" in inner or "root_port" in inner:
            return "PHB"
        return "PIX" if inner.count("switch") == 1 else "PXB"

    def nvlink_path(self, a: str, b: str) -> tuple[str, ...] | None:
        """GPU to GPU by a direct NVLink or one NVLink switch; None without."""
        graph = self.nvlink_graph
        if graph.has_edge(a, b):
            return (a, b)
        for middle in graph.neighbors(a):
            if self.kinds[middle] == "nvswitch" and graph.has_edge(middle, b):
                return (a, middle, b)
        return None

    def socket_of(self, node: str) -> str:
        """The socket nearest to a node."""
        self._known(node)
        sockets = [n for n, kind in self.kinds.items() if kind == "socket"]
        return min(sockets, key=lambda s: (len(self.host_graph.path(node, s)), s))

    def _known(self, *names: str) -> None:
        for name in names:
            if name not in self.kinds:
                raise ValueError(f"no node {name!r}; the topology has {', '.join(self.kinds)}")
