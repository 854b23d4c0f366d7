"""Priors against a host that nothing is fitted to: nccl-tests of 8 GPUs on a dual EPYC Turin.

8 x RTX 5090, each on its own root port, peer to peer (P2P driver fork's published table, NCCL
2.29.7): 24.6 us up to 2 KiB (LL), 36.3 at 4 KiB (Simple), up to 177 us at 4 MiB.
"""

from pathlib import Path

import numpy as np
import pytest

from model.allreduce.calibrate import Rows, prior_fit, specs_for
from model.allreduce.model import allreduce_design
from model.machine import load_machine
from model.nccl.settings import NcclSettings

ROOT = Path(__file__).parents[2]
PUBLISHED_US = {
    1 << 10: 24.6, 2 << 10: 24.6, 4 << 10: 36.3, 32 << 10: 39.3, 128 << 10: 42.2, 256 << 10: 45.9,
    512 << 10: 57.0, 1 << 20: 74.7, 4 << 20: 177.0,
}  # fmt: skip


def rows() -> Rows:
    machine = load_machine(ROOT / "studies/machines/8x-rtx-pro-6000-direct.yaml")
    settings = NcclSettings.from_env({"NCCL_P2P_LEVEL": "SYS"})
    design = allreduce_design(machine, 8, "nccl", settings, "2.29.7", list(PUBLISHED_US))
    count = len(PUBLISHED_US)
    return Rows(
        design=design,
        time_us=np.array(list(PUBLISHED_US.values())),
        graphed=np.ones(count, dtype=bool),
    )


def test_ll_up_to_2_kib_and_simple_from_4_kib_as_published() -> None:
    seen = rows()
    np.testing.assert_array_equal(seen.design.ll, [s <= 2048 for s in PUBLISHED_US])


def test_the_published_times_lie_in_the_priors_interval_and_near_the_median() -> None:
    seen = rows()
    predicted = prior_fit(specs_for(seen)).predict(seen.design, seen.graphed)
    assert predicted.covers(seen.time_us).all()
    error = predicted.median_us / seen.time_us - 1.0
    # at 4 MiB the rate of the links decides, which this host's own file would state
    assert np.abs(error[:-1]).max() < 0.35
    assert abs(error[-1]) < 0.5
    assert float(np.median(np.abs(error))) < 0.3


def test_a_hop_of_simple_costs_what_was_measured_not_what_nccls_table_says() -> None:
    """2.3-3.2 us measured per hop of two ranks' neighbours, 5.7 us in NCCL's own table."""
    seen = rows()
    predicted = prior_fit(specs_for(seen)).predict(seen.design, seen.graphed).median_us
    at_4_kib = list(PUBLISHED_US).index(4 << 10)
    assert 2.0 <= (predicted[at_4_kib] - 3.3) / 14 <= 3.2
    assert predicted[at_4_kib] - predicted[0] == pytest.approx(36.3 - 24.6, abs=13.0)
