"""A small undirected graph: what a topology of a few dozen devices asks for.

networkx has all of it, but its import takes longer than a command may take to answer.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Edge = TypeVar("Edge")


class Graph(Generic[Edge]):
    """Nodes in the order they were added, at most one edge between two, each with a value."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._near: dict[str, dict[str, Edge]] = {node: {} for node in nodes}
        #: from each start asked for, what ``parents_from`` gives; joining two nodes ends it
        self._before: dict[str, dict[str, str]] = {}

    def add_edge(self, a: str, b: str, value: Edge) -> None:
        """Join two known nodes; a second edge replaces the first."""
        self._near[a][b] = value
        self._near[b][a] = value
        self._before.clear()

    def neighbors(self, node: str) -> Iterator[str]:
        """The nodes next to one, as they were joined."""
        return iter(self._near[node])

    def has_edge(self, a: str, b: str) -> bool:
        """Whether two nodes are joined."""
        return b in self._near[a]

    def edge(self, a: str, b: str) -> Edge:
        """The value between two nodes. Raises ``KeyError`` when they are not joined."""
        return self._near[a][b]

    def without(self, nodes: Iterable[str]) -> "Graph[Edge]":
        """A copy that lacks some nodes."""
        gone = set(nodes)
        rest: Graph[Edge] = Graph(node for node in self._near if node not in gone)
        for node in rest._near:
            rest._near[node] = {k: v for k, v in self._near[node].items() if k not in gone}
        return rest

    def parents_from(self, start: str) -> dict[str, str]:
        """Every node reached from ``start`` -> the node before it, fewest edges first."""
        if start not in self._before:
            self._before[start] = self._search(start)
        return self._before[start]

    def _search(self, start: str) -> dict[str, str]:
        before = {start: start}
        front = [start]
        for node in front:
            for far in self._near[node]:
                if far not in before:
                    before[far] = node
                    front.append(far)
        return before

    def path(self, a: str, b: str) -> tuple[str, ...]:
        """Nodes from ``a`` to ``b``, fewest edges. Raises ``ValueError`` when none leads there."""
        before = self.parents_from(b)
        if a not in before:
            raise ValueError(f"nothing joins {a!r} and {b!r}")
        nodes = [a]
        while nodes[-1] != b:
            nodes.append(before[nodes[-1]])
        return tuple(nodes)

    def parts(self) -> list[frozenset[str]]:
        """The connected parts."""
        found: list[frozenset[str]] = []
        seen: set[str] = set()
        for node in self._near:
            if node not in seen:
                found.append(frozenset(self.parents_from(node)))
                seen |= found[-1]
        return found

    def cycle(self) -> tuple[str, ...] | None:
        """The nodes of one cycle, or None in a forest."""
        for part in self.parts():
            start = next(node for node in self._near if node in part)
            before = self.parents_from(start)
            for a in before:
                for b in self._near[a]:
                    # the one edge of a cycle that the walk did not take
                    if before[a] != b and before[b] != a:
                        return _joined(before, a, b)
        return None


def _joined(before: dict[str, str], a: str, b: str) -> tuple[str, ...]:
    """The cycle that the edge a-b closes with the ways to their first common node."""
    way_a, way_b = _way(before, a), _way(before, b)
    meeting = next(node for node in way_a if node in set(way_b))
    down = way_b[: way_b.index(meeting)]
    return (*way_a[: way_a.index(meeting) + 1], *reversed(down))


def _way(before: dict[str, str], node: str) -> list[str]:
    way = [node]
    while before[way[-1]] != way[-1]:
        way.append(before[way[-1]])
    return way
