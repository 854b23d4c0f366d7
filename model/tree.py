"""Accept length of chains and trees from acceptance rates; the best tree for a node budget.

``rate_DR[d, r]``: probability that the r-th ranked draft token at depth d (both from 0 here) is
accepted, given that its parent was. A tree's accept length is 1 (the bonus token) plus the sum
over its nodes of the product of rates along the path (positional acceptance, as in Sequoia,
arXiv:2402.12374). Shape suffixes: S samples, D depths, R ranks, N nodes, B budgets.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def chain_accept_length(rate_D: Array) -> float:
    """1 + sum over depths of the product of conditional rates up to that depth."""
    return 1.0 + float(np.cumprod(np.asarray(rate_D, dtype=float)).sum())


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes an EAGLE draft keeps as candidates, best path first (the root is not listed)."""

    #: probability that the path to the node is accepted
    path: Array
    depth: NDArray[np.int64]
    rank: NDArray[np.int64]

    def accept_length(self, draft_tokens: int) -> float:
        """With the best ``draft_tokens`` - 1 nodes (draft_tokens counts the root)."""
        return 1.0 + float(self.path[: draft_tokens - 1].sum())

    def accepted_table(self, draft_tokens: int, num_depths: int, num_ranks: int) -> Array:
        """Probability that the accepted path holds a node of (depth, rank), within the table."""
        table = np.zeros((num_depths, num_ranks))
        kept = np.arange(self.path.size) < draft_tokens - 1
        kept &= (self.depth < num_depths) & (self.rank < num_ranks)
        np.add.at(table, (self.depth[kept], self.rank[kept]), self.path[kept])
        return table


def dynamic_tree(rate_DR: Array, steps: int, topk: int) -> DraftTree:
    """The candidates of EAGLE-2/3's dynamic tree when path scores equal acceptance.

    Each step expands the ``topk`` best paths of the last level by ``topk`` children each; the pool
    holds topk + (steps - 1) * topk^2 nodes. A child never scores above its parent, so the best
    nodes of the pool always form a tree.
    """
    rate_DR = np.asarray(rate_DR, dtype=float)
    _check_reach(rate_DR.shape, steps, topk)
    beam = np.ones(1)
    paths, depths, ranks = [], [], []
    rank_K = np.arange(topk)
    for depth in range(steps):
        level = (beam[:, None] * rate_DR[depth, None, :topk]).ravel()
        paths.append(level)
        depths.append(np.full(level.size, depth))
        ranks.append(np.tile(rank_K, beam.size))
        beam = np.sort(level)[::-1][:topk]
    path, level_of = np.concatenate(paths), np.concatenate(depths)
    # ties: the shallower node first, so that a parent never comes after its child
    order = np.lexsort((level_of, -path))
    return DraftTree(path[order], level_of[order], np.concatenate(ranks)[order])


def dynamic_accepted_tables(
    rate_SDR: Array, steps: int, topk: int, draft_tokens: int, num_depths: int, num_ranks: int
) -> Array:
    """``DraftTree.accepted_table`` of the dynamic tree of many rate tables at once: [S, D, R].

    Raises ``ValueError`` as ``dynamic_tree`` does.
    """
    num_samples = rate_SDR.shape[0]
    _check_reach(rate_SDR.shape[1:], steps, topk)
    beam = np.ones((num_samples, 1))
    paths = []
    for depth in range(steps):
        level = (beam[:, :, None] * rate_SDR[:, depth, None, :topk]).reshape(num_samples, -1)
        paths.append(level)
        beam = -np.sort(-level, axis=1)[:, :topk]
    sizes = [level.shape[1] for level in paths]
    depth_N = np.repeat(np.arange(steps), sizes)
    rank_N = np.concatenate([np.arange(size) % topk for size in sizes])
    path_SN = np.concatenate(paths, axis=1)
    # stable: of equal paths the shallower comes first, as in one tree
    kept = np.argsort(-path_SN, axis=1, kind="stable")[:, : draft_tokens - 1]
    value = np.take_along_axis(path_SN, kept, axis=1)
    inside = (depth_N[kept] < num_depths) & (rank_N[kept] < num_ranks)
    cell = (np.arange(num_samples)[:, None] * num_depths + depth_N[kept]) * num_ranks
    cell = np.where(inside, cell + rank_N[kept], 0)
    flat = np.bincount(
        cell.ravel(),
        np.where(inside, value, 0.0).ravel(),
        minlength=num_samples * num_depths * num_ranks,
    )
    table: Array = flat.reshape(num_samples, num_depths, num_ranks)
    return table


def _check_reach(shape: tuple[int, ...], steps: int, topk: int) -> None:
    if steps > shape[0] or topk > shape[1]:
        raise ValueError(
            f"rates for {shape[0]} depths and {shape[1]} ranks do not reach "
            f"steps {steps}, topk {topk}"
        )


def dynamic_accept_lengths(rate_SDR: Array, steps: int, topk: int) -> Array:
    """Accept length by number of nodes kept, for many rate tables at once: [S, 1 + pool].

    ``out[s, n]`` is with the best n nodes; ``out[s, 0]`` is 1. Same rule as ``dynamic_tree``.
    """
    num_samples = rate_SDR.shape[0]
    beam = np.ones((num_samples, 1))
    pool = []
    for depth in range(steps):
        level = (beam[:, :, None] * rate_SDR[:, depth, None, :topk]).reshape(num_samples, -1)
        pool.append(level)
        beam = -np.sort(-level, axis=1)[:, :topk]
    best = -np.sort(-np.concatenate(pool, axis=1), axis=1)
    return np.concatenate([np.ones((num_samples, 1)), 1.0 + np.cumsum(best, axis=1)], axis=1)


def best_tree_accept_lengths(rate_DR: Array, max_nodes: int) -> Array:
    """The most any tree of n nodes (root included) can emit per verify: [max_nodes + 1].

    Dynamic programme of Sequoia with rates that may differ by depth: ``best[d][n]`` is the value
    of a subtree of n nodes whose root sits at depth d; children are added rank by rank. Entry 0 is
    0. Depth is bounded by the rows of ``rate_DR`` and width by its columns.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes {max_nodes} must be at least 1 (the root)")
    num_depths, num_ranks = rate_DR.shape
    subtree = np.zeros(max_nodes + 1)
    subtree[1:] = 1.0
    for depth in range(num_depths - 1, -1, -1):
        # forest[n]: best value of children holding n nodes together, ranks considered so far
        forest = np.zeros(max_nodes)
        for rank in range(min(num_ranks, max_nodes - 1)):
            child = rate_DR[depth, rank] * subtree[:max_nodes]
            forest = _max_plus(forest, child)
        subtree = np.concatenate([[0.0], 1.0 + forest])
    return np.maximum.accumulate(subtree)


def _max_plus(a_B: Array, b_B: Array) -> Array:
    """out[n] = max over i + j = n of a[i] + b[j]."""
    size = a_B.size
    index = np.arange(size)
    split = index[:, None] - index[None, :]
    table = np.where(split >= 0, a_B[np.maximum(split, 0)] + b_B[None, :], -np.inf)
    result: Array = table.max(axis=1)
    return result
