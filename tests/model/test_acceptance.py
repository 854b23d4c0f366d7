"""Acceptance: chains, trees, learning from counts, and honest extrapolation."""

import itertools

import numpy as np
import pytest

from model.acceptance import AcceptanceModel, rates_of
from model.observations import AcceptanceCounts, AcceptLength
from model.spec import Knobs
from model.tree import (
    best_tree_accept_lengths,
    chain_accept_length,
    dynamic_accept_lengths,
    dynamic_accepted_tables,
    dynamic_tree,
)

#: vLLM issue 26191, Llama-3.1-8B, chain of 7: share of 4816 verifies that reach each depth
CUMULATIVE = (0.74, 0.54, 0.41, 0.31, 0.23, 0.17, 0.13)
#: (steps, topk, draft_tokens, accept length): SpecForge issue 339 and AngelSlim issue 163
SPECFORGE = ((3, 1, 4, 1.86), (3, 3, 8, 2.2), (3, 3, 4, 1.99), (7, 4, 16, 2.52), (6, 4, 12, 2.42),
             (8, 8, 60, 3.2))  # fmt: skip
ANGELSLIM = ((3, 3, 4, 2.017), (3, 2, 8, 2.216), (4, 4, 16, 2.542), (7, 10, 64, 3.034))


def chain_counts(verifies: int, shares: tuple[float, ...]) -> AcceptanceCounts:
    return AcceptanceCounts(
        steps=len(shares),
        topk=1,
        draft_tokens=len(shares) + 1,
        num_verifies=verifies,
        accepted_by_depth=tuple(int(verifies * s) for s in shares),
    )


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9])
def test_a_chain_of_constant_rate_has_the_geometric_accept_length(rate: float) -> None:
    want = sum(rate**d for d in range(6))
    assert chain_accept_length(np.full(5, rate)) == pytest.approx(want)


def test_a_chain_is_the_tree_with_one_child() -> None:
    rates = np.random.default_rng(0).uniform(0.2, 0.8, (5, 3))
    table = dynamic_accept_lengths(rates[None], 5, 1)[0]
    assert table[5] == pytest.approx(chain_accept_length(rates[:, 0]))
    assert dynamic_tree(rates, 5, 1).accept_length(6) == pytest.approx(table[5])


def brute_force_best(rates: np.ndarray, nodes: int) -> float:
    """Best tree by trying every set of nodes closed under parents."""
    paths = [p for d in (1, 2, 3) for p in itertools.product(range(rates.shape[1]), repeat=d)]
    paths = [p for p in paths if len(p) <= rates.shape[0]]
    value = {p: float(np.prod([rates[d, r] for d, r in enumerate(p)])) for p in paths}
    best = 1.0
    for chosen in itertools.combinations(paths, nodes - 1):
        kept = set(chosen)
        if all(len(p) == 1 or p[:-1] in kept for p in kept):
            best = max(best, 1.0 + sum(value[p] for p in kept))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_programme_finds_the_best_tree(seed: int) -> None:
    rates = -np.sort(-np.random.default_rng(seed).uniform(0.05, 0.9, (3, 2)), axis=1)
    table = best_tree_accept_lengths(rates, 5)
    for nodes in (2, 3, 4, 5):
        assert table[nodes] == pytest.approx(brute_force_best(rates, nodes))


def test_no_draft_tree_beats_the_best_tree_of_its_size() -> None:
    rates = AcceptanceModel.prior().rates()[:6, :8]
    bound = best_tree_accept_lengths(rates, 33)
    for steps, topk in ((3, 2), (6, 4), (5, 8)):
        lengths = dynamic_accept_lengths(rates[None], steps, topk)[0]
        for nodes in range(2, min(33, lengths.size)):
            assert lengths[nodes - 1] <= bound[nodes] + 1e-9


def test_the_models_bound_holds_for_its_own_trees() -> None:
    model = AcceptanceModel.prior()
    for steps, topk, tokens in ((3, 1, 4), (4, 4, 12), (6, 8, 32)):
        lengths = dynamic_accept_lengths(model.rates()[None], steps, topk)[0]
        assert lengths[tokens - 1] <= model.best_tree(tokens, steps) + 1e-9
    assert model.best_tree(1) == 1.0


@pytest.mark.parametrize(
    ("steps", "topk", "tokens", "depths", "ranks"),
    [
        pytest.param(3, 1, 4, 3, 16, id="chain"),
        pytest.param(4, 3, 10, 4, 16, id="tree"),
        pytest.param(5, 4, 17, 3, 2, id="table-smaller-than-the-tree"),
        pytest.param(2, 8, 64, 2, 16, id="all-nodes-kept"),
    ],
)
def test_trees_of_many_tables_at_once_are_those_of_each(
    steps: int, topk: int, tokens: int, depths: int, ranks: int
) -> None:
    tables = AcceptanceModel.prior().samples[:9]
    together = dynamic_accepted_tables(tables, steps, topk, tokens, depths, ranks)
    apart = [dynamic_tree(t, steps, topk).accepted_table(tokens, depths, ranks) for t in tables]
    np.testing.assert_allclose(together, np.stack(apart), atol=1e-14)


def test_a_kept_node_always_has_its_parent() -> None:
    tree = dynamic_tree(AcceptanceModel.prior().rates(), 4, 3)
    for size in (4, 8, 16):
        table = tree.accepted_table(size, 4, 3)
        # depth d + 1 is only reached through depth d
        assert (np.diff(table.sum(axis=1)) <= 1e-12).all()


def test_counts_move_the_posterior_to_the_measured_accept_length() -> None:
    model = AcceptanceModel.prior().update([chain_counts(4816, CUMULATIVE)])
    got = model.accept_length(Knobs.of({"speculation.method": "eagle3", "speculation.steps": 7,
                                        "speculation.topk": 1}))  # fmt: skip
    assert got.median == pytest.approx(1 + sum(CUMULATIVE), rel=0.01)
    assert got.high - got.low < 0.25


def test_a_chain_of_three_extrapolates_to_seven_within_its_interval() -> None:
    model = AcceptanceModel.prior().update([chain_counts(4816, CUMULATIVE[:3])])
    low, median, high = np.quantile(model.accept_length_samples(7, 1, 8), [0.05, 0.5, 0.95])
    assert low <= 1 + sum(CUMULATIVE) <= high
    assert median == pytest.approx(1 + sum(CUMULATIVE), rel=0.05)


def test_unmeasured_depths_are_less_certain_than_measured_ones() -> None:
    short = AcceptanceModel.prior().update([chain_counts(4816, CUMULATIVE[:3])])
    full = AcceptanceModel.prior().update([chain_counts(4816, CUMULATIVE)])
    spread = [np.log(m.accept_length_samples(7, 1, 8)).std() for m in (short, full)]
    assert spread[0] > 2 * spread[1]


def test_more_counts_narrow_and_one_update_equals_two() -> None:
    half, whole = chain_counts(1000, (0.7, 0.5, 0.35)), chain_counts(2000, (0.7, 0.5, 0.35))
    twice = AcceptanceModel.prior().update([half]).update([half])
    once = AcceptanceModel.prior().update([whole])
    np.testing.assert_allclose(twice.rates()[:3, 0], once.rates()[:3, 0], atol=0.004)
    assert once.covariance[0, 0] < AcceptanceModel.prior().covariance[0, 0] / 10


def test_tree_counts_recover_the_rates_they_were_drawn_from() -> None:
    truth = AcceptanceModel.prior(first_rate=0.6, ratio=0.92)
    table = rates_of(truth.theta[None])[0]
    tree = dynamic_tree(table, 4, 4).accepted_table(16, 4, 4)
    counts = np.round(20000 * tree).astype(int)
    seen = AcceptanceCounts(
        steps=4, topk=4, draft_tokens=16, num_verifies=20000,
        accepted_by_depth=tuple(int(v) for v in counts.sum(axis=1)),
        accepted_by_depth_rank=tuple(tuple(int(v) for v in row) for row in counts),
    )  # fmt: skip
    model = AcceptanceModel.prior().update([seen])
    np.testing.assert_allclose(model.rates()[:3, 0], table[:3, 0], atol=0.03)
    # few nodes of the last depth are kept, so little is learnt about it
    assert model.rates()[3, 0] == pytest.approx(table[3, 0], abs=0.08)
    assert model.rates()[0, 1] == pytest.approx(table[0, 1], abs=0.02)


@pytest.mark.parametrize("grid", [SPECFORGE, ANGELSLIM], ids=["specforge", "angelslim"])
def test_published_tree_grids_are_predicted_leave_one_out(
    grid: tuple[tuple[int, int, int, float], ...],
) -> None:
    errors = []
    for left in grid:
        seen = [
            AcceptLength(steps=s, topk=k, draft_tokens=n, accept_length=tau, rel_sd=0.03)
            for s, k, n, tau in grid
            if (s, k, n, tau) != left
        ]
        model = AcceptanceModel.prior().update(seen)
        errors.append(np.median(model.accept_length_samples(*left[:3])) / left[3] - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.045


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: chain_counts(-1, (0.5,)), "must not be negative", id="verifies"),
        pytest.param(
            lambda: AcceptanceCounts(steps=2, topk=1, draft_tokens=3, num_verifies=10,
                                     accepted_by_depth=(5, 6)),
            "counts are cumulative", id="growing",
        ),
        pytest.param(
            lambda: AcceptLength(steps=2, topk=1, draft_tokens=3, accept_length=3.5, rel_sd=0.1),
            "between 1 and steps", id="too-long",
        ),
        pytest.param(lambda: AcceptanceModel.prior(first_rate=1.0), "first_rate 1.0", id="rate"),
        pytest.param(
            lambda: AcceptanceModel.prior().accept_length_samples(40, 1, 41), "steps 40", id="deep"
        ),
    ],
)  # fmt: skip
def test_impossible_acceptance_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("topk", "given", "whole"),
    [
        pytest.param(1, (40, 12), (40, 12, 0, 0), id="chain"),
        pytest.param(1, (), (0, 0, 0, 0), id="nothing-accepted"),
        pytest.param(4, (60, 25), (60, 25, 0, 0), id="tree"),
    ],
)
def test_counts_end_at_the_deepest_depth_that_was_reached(
    topk: int, given: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    def counts(by_depth: tuple[int, ...]) -> AcceptanceCounts:
        return AcceptanceCounts(
            steps=4,
            topk=topk,
            draft_tokens=5 if topk == 1 else 12,
            num_verifies=100,
            accepted_by_depth=by_depth,
            accepted_by_depth_rank=tuple((n, *(0,) * (topk - 1)) for n in by_depth),
        )

    short = AcceptanceModel.prior().update([counts(given)])
    padded = AcceptanceModel.prior().update([counts(whole)])
    np.testing.assert_allclose(short.theta, padded.theta)
    before = AcceptanceModel.prior().accept_length_samples(4, topk, 5).mean()
    assert short.accept_length_samples(4, topk, 5).mean() < before
