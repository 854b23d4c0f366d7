"""The small graph answers as networkx does."""

import random
from itertools import pairwise

import networkx as nx
import pytest

from model.graph import Graph


def random_pair(seed: int) -> tuple[Graph[int], "nx.Graph[str]"]:
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(rng.randrange(1, 12))]
    ours: Graph[int] = Graph(names)
    theirs: nx.Graph[str] = nx.Graph()
    theirs.add_nodes_from(names)
    for value in range(rng.randrange(0, 14) if len(names) > 1 else 0):
        a, b = rng.sample(names, 2)
        ours.add_edge(a, b, value)
        theirs.add_edge(a, b, value=value)
    return ours, theirs


@pytest.mark.parametrize("seed", range(60))
def test_paths_parts_and_edges_agree_with_networkx(seed: int) -> None:
    ours, theirs = random_pair(seed)
    assert set(ours.parts()) == {frozenset(part) for part in nx.connected_components(theirs)}
    for a in theirs:
        assert list(ours.neighbors(a)) == list(theirs.neighbors(a))
        for b in theirs:
            if nx.has_path(theirs, a, b):
                path = ours.path(a, b)
                assert (path[0], path[-1]) == (a, b)
                assert len(path) - 1 == nx.shortest_path_length(theirs, a, b)
                assert all(theirs.has_edge(*pair) for pair in pairwise(path))
            else:
                with pytest.raises(ValueError, match="nothing joins"):
                    ours.path(a, b)
            assert ours.has_edge(a, b) == theirs.has_edge(a, b)
            if ours.has_edge(a, b):
                assert ours.edge(a, b) == theirs.edges[a, b]["value"]


@pytest.mark.parametrize("seed", range(60))
def test_a_cycle_is_found_exactly_when_there_is_one(seed: int) -> None:
    ours, theirs = random_pair(seed)
    cycle = ours.cycle()
    assert (cycle is None) == nx.is_forest(theirs)
    if cycle is not None:
        assert len(cycle) == len(set(cycle)) >= 3
        assert all(
            theirs.has_edge(*pair) for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        )


@pytest.mark.parametrize("seed", range(20))
def test_leaving_out_nodes_keeps_the_rest_and_the_original(seed: int) -> None:
    ours, theirs = random_pair(seed)
    gone = list(theirs)[::2]
    rest = ours.without(gone)
    kept = theirs.subgraph(set(theirs) - set(gone))
    assert set(rest.parts()) == {frozenset(part) for part in nx.connected_components(kept)}
    assert set(ours.parts()) == {frozenset(part) for part in nx.connected_components(theirs)}
