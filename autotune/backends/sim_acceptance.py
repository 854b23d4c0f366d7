"""Draws acceptance of a simulated draft head: verify by verify, never averages.

The top child of a node at depth d is right with probability ``top1 * decay**(d - 1)``; a share
``rank_mass`` of the rest falls on the other children by a Zipf law. Contexts differ: a normal
shift of the logit, drawn once per request and once per verify, makes easy and hard stretches.
Form: docs of EAGLE-2/3 dynamic trees and the fits in the project's speculation notes (1.2, 1.3).
"""

import math
from dataclasses import dataclass

import numpy as np

from autotune.records import Acceptance
from model.spec import Knobs

#: ranks with a probability of their own; wider trees than this gain nothing in the simulation
MAX_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenAcceptance:
    """Constants of the simulated head; the predictor never sees them."""

    top1: float
    decay: float
    rank_mass: float
    rank_exponent: float
    request_spread: float
    verify_spread: float

    def rank_probabilities(self, depth: int, shift: float, num_ranks: int) -> list[float]:
        """P(the child of rank r at ``depth`` is right), r = 0 .. num_ranks - 1; sums to < 1."""
        mean = min(max(self.top1 * self.decay ** (depth - 1), 1e-6), 1.0 - 1e-6)
        top = 1.0 / (1.0 + (1.0 - mean) / mean * math.exp(-shift))
        zipf = [(rank + 1) ** -self.rank_exponent for rank in range(MAX_RANKS - 1)]
        rest = (1.0 - top) * self.rank_mass / sum(zipf)
        # the draft ranks by its own belief: a lower rank that beat the top would be the top
        return [top, *(min(rest * weight, top) for weight in zipf)][:num_ranks]


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft tree: ``children[node]`` maps the rank of a child to its node; node 0 is the root."""

    children: tuple[dict[int, int], ...]
    depth: int


def draft_tree(knobs: Knobs, acceptance: HiddenAcceptance) -> Tree:
    """The tree that EAGLE's dynamic selection builds for a context of mean difficulty.

    Each step expands the ``topk`` best nodes of the level before by ``topk`` children each; the
    ``draft_tokens - 1`` best of all candidates by path probability stay (a parent always scores
    at least its child, so the kept nodes form a tree).
    """
    # (path probability, parent candidate, depth, rank); -1 is the root
    candidates: list[tuple[float, int, int, int]] = []
    beam: list[tuple[float, int]] = [(1.0, -1)]
    for depth in range(1, knobs.steps + 1):
        probabilities = acceptance.rank_probabilities(depth, 0.0, min(knobs.topk, MAX_RANKS))
        level = []
        for path, parent in beam:
            for rank, probability in enumerate(probabilities):
                candidates.append((path * probability, parent, depth, rank))
                level.append((path * probability, len(candidates) - 1))
        beam = sorted(level, key=lambda item: -item[0])[: knobs.topk]
    order = sorted(range(len(candidates)), key=lambda index: (-candidates[index][0], index))
    kept = sorted(order[: knobs.draft_tokens - 1])
    node_of = {-1: 0} | {candidate: node + 1 for node, candidate in enumerate(kept)}
    children: list[dict[int, int]] = [{} for _ in range(len(kept) + 1)]
    for candidate in kept:
        _, parent, _, rank = candidates[candidate]
        children[node_of[parent]][rank] = node_of[candidate]
    depth = max((candidates[candidate][2] for candidate in kept), default=0)
    return Tree(tuple(children), depth)


class AcceptanceDraws:
    """Draws the accepted path of each verify of one request and keeps the counts."""

    def __init__(
        self,
        tree: Tree,
        acceptance: HiddenAcceptance,
        request_shift: float,
        draws: np.random.Generator,
    ) -> None:
        """``request_shift`` is the prompt's difficulty in units of ``request_spread``."""
        self._tree = tree
        self._acceptance = acceptance
        self._draws = draws
        self._shift = acceptance.request_spread * request_shift
        self.num_ranks = max((max(c, default=-1) for c in tree.children), default=-1) + 1
        self.paths: list[tuple[int, ...]] = []

    def verify(self) -> int:
        """Draw one verify; number of accepted drafts. ``paths`` gains the accepted ranks."""
        shift = self._shift + self._acceptance.verify_spread * float(self._draws.normal())
        node = 0
        path: list[int] = []
        while self._tree.children[node]:
            probabilities = self._acceptance.rank_probabilities(
                len(path) + 1, shift, self.num_ranks
            )
            draw, rank = float(self._draws.random()), 0
            while rank < len(probabilities) and draw >= probabilities[rank]:
                draw -= probabilities[rank]
                rank += 1
            if rank not in self._tree.children[node]:
                break
            node = self._tree.children[node][rank]
            path.append(rank)
        self.paths.append(tuple(path))
        return len(path)


def count_acceptance(requests: list[AcceptanceDraws], tree: Tree, num_drafted: int) -> Acceptance:
    """Counts over all verifies of all requests, as ``records.Acceptance`` defines them."""
    paths = [path for request in requests for path in request.paths]
    num_ranks = max((request.num_ranks for request in requests), default=0)
    by_rank = [[0] * num_ranks for _ in range(tree.depth)]
    histogram = [0] * (tree.depth + 1)
    for path in paths:
        histogram[len(path)] += 1
        for level, rank in enumerate(path):
            by_rank[level][rank] += 1
    return Acceptance(
        num_verifies=len(paths),
        num_drafted=len(paths) * num_drafted,
        num_accepted=sum(len(path) for path in paths),
        accepted_by_depth=tuple(sum(ranks) for ranks in by_rank),
        histogram=tuple(histogram),
        accepted_by_depth_rank=tuple(tuple(ranks) for ranks in by_rank),
    )
