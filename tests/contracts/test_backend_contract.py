"""Every backend keeps the same contract: lifecycle, records, failures as values, clean-up."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from contract_harness import (
    ROOT,
    Harness,
    engine_harness,
    replay_harness,
    sim_harness,
)

from autotune.backends.base import UNPLACED, Backend, Group
from autotune.backends.registry import backend_names
from autotune.records import Measurement, Provenance
from model.spec import CYCLE_TERMS, DECODE_TERMS, Knobs

#: the parts of a cycle must add up to it
SUM_TOLERANCE = 0.02


@pytest.fixture(
    scope="class",
    params=[
        "sim",
        "replay",
        "engine",
        pytest.param("engine-cuda", marks=pytest.mark.gpu),
    ],
)
def harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Harness]:
    """A backend, used by all tests of a class and closed at the end."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sim":
        made = sim_harness(folder)
    elif request.param == "replay":
        made = replay_harness(folder)
    else:
        made = engine_harness(folder, checkpoint, "cpu" if request.param == "engine" else "cuda")
    yield made
    made.backend.close()


def opened(harness: Harness, knobs: Knobs) -> Backend:
    """The backend with the group of ``knobs`` open; an open one is kept."""
    backend = harness.backend
    if getattr(backend, "_group", None) != backend.group(knobs):
        backend.open(backend.group(knobs))
    return backend


def children() -> set[int]:
    """Living child processes of this one (a finished helper may still be a zombie)."""
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }


class TestBackendContract:
    """Run on every backend; the order is that of a real session, ending with a failure."""

    def test_it_satisfies_the_protocol(self, harness: Harness) -> None:
        assert isinstance(harness.backend, Backend)
        assert harness.backend.name in backend_names()

    def test_measuring_before_opening_is_refused(self, harness: Harness) -> None:
        harness.backend.close()
        with pytest.raises(RuntimeError, match=r"measure\(\) before open\(\)"):
            harness.backend.measure(harness.plain, harness.workload, 0)

    def test_groups_are_stable_and_hashable(self, harness: Harness) -> None:
        group = harness.backend.group(harness.chain)
        assert isinstance(group, Group)
        assert len({group, harness.backend.group(harness.chain)}) == 1
        assert group.id == harness.backend.group(harness.chain).id

    def test_speculation_alone_needs_no_restart(self, harness: Harness) -> None:
        groups = {harness.backend.group(k) for k in (harness.plain, harness.chain, harness.tree)}
        assert len(groups) == 1

    @pytest.mark.parametrize("which", ["plain", "chain", "tree"])
    def test_a_repeat_fills_what_the_records_ask(self, harness: Harness, which: str) -> None:
        knobs: Knobs = getattr(harness, which)
        measured = opened(harness, knobs).measure(knobs, harness.workload, 1)
        assert measured.failure is None, measured.failure
        assert (measured.knobs_id, measured.concurrency) == (knobs.id, 2)
        assert (measured.trial, measured.order, measured.repeat) == (UNPLACED, UNPLACED, 1)
        assert measured.started <= measured.ended
        assert measured.tokens_per_s is not None
        assert measured.tokens_per_s > 0
        assert measured.output_check == "exact", measured.notes
        assert len(measured.prompts) == 2
        assert {p.output_tokens for p in measured.prompts} == {harness.workload.output_len}
        absent = {
            name
            for name in ("ttft_ms", "tpot_ms", "cycle_ms", "accept_length", "acceptance")
            if getattr(measured, name) is None
        }
        assert absent <= set(measured.unknown)

    @pytest.mark.parametrize("which", ["plain", "chain", "tree"])
    def test_terms_have_the_models_names_and_sum_to_the_cycle(
        self, harness: Harness, which: str
    ) -> None:
        knobs: Knobs = getattr(harness, which)
        measured = opened(harness, knobs).measure(knobs, harness.workload, 0)
        names = DECODE_TERMS if which == "plain" else CYCLE_TERMS
        assert set(measured.terms_ms) <= set(names)
        assert measured.cycle_ms is not None
        total = sum(measured.terms_ms.values())
        assert total == pytest.approx(measured.cycle_ms, rel=SUM_TOLERANCE)

    @pytest.mark.parametrize("which", ["chain", "tree"])
    def test_acceptance_counts_agree_with_one_another(self, harness: Harness, which: str) -> None:
        knobs: Knobs = getattr(harness, which)
        measured = opened(harness, knobs).measure(knobs, harness.workload, 0)
        counts = measured.acceptance
        assert counts is not None
        assert sum(counts.histogram) == counts.num_verifies > 0
        assert counts.num_drafted == counts.num_verifies * (knobs.draft_tokens - 1)
        accepted = sum(n * verifies for n, verifies in enumerate(counts.histogram))
        assert accepted == counts.num_accepted == sum(counts.accepted_by_depth)
        for depth, reached in enumerate(counts.accepted_by_depth, start=1):
            assert reached == sum(counts.histogram[depth:])
            assert reached == sum(counts.accepted_by_depth_rank[depth - 1])
        assert measured.accept_length == pytest.approx(1 + accepted / counts.num_verifies)
        verifies = [v for prompt in measured.prompts for v in prompt.tokens_per_verify]
        assert len(verifies) == counts.num_verifies
        assert sum(verifies) == counts.num_accepted + counts.num_verifies

    def test_plain_decoding_emits_one_token_a_cycle(self, harness: Harness) -> None:
        knobs = harness.plain
        measured = opened(harness, knobs).measure(knobs, harness.workload, 0)
        assert measured.acceptance is None
        assert measured.accept_length == 1.0
        assert measured.cycle_ms is not None
        assert measured.tokens_per_s == pytest.approx(2e3 / measured.cycle_ms, rel=0.05)

    def test_records_survive_json(self, harness: Harness) -> None:
        backend = opened(harness, harness.chain)
        measured = backend.measure(harness.chain, harness.workload, 0)
        assert Measurement.model_validate_json(measured.model_dump_json()) == measured
        provenance = backend.provenance()
        assert Provenance.model_validate_json(provenance.model_dump_json()) == provenance
        assert provenance.config
        assert len(provenance.config_hash) == 16

    def test_knobs_of_another_group_are_refused_until_it_is_open(self, harness: Harness) -> None:
        if harness.backend.group(harness.other) == harness.backend.group(harness.plain):
            pytest.skip("this backend has one group")
        backend = opened(harness, harness.plain)
        with pytest.raises(RuntimeError, match="open it first"):
            backend.measure(harness.other, harness.workload, 0)
        backend.open(backend.group(harness.other))
        assert backend.measure(harness.other, harness.workload, 0).failure is None
        with pytest.raises(RuntimeError, match="open it first"):
            backend.measure(harness.plain, harness.workload, 0)

    def test_a_failure_is_a_value_and_the_next_repeat_may_be_asked_for(
        self, harness: Harness
    ) -> None:
        backend = opened(harness, harness.chain)
        backend.measure(harness.chain, harness.workload, 0)
        kinds = harness.provoke()
        measured = backend.measure(harness.chain, harness.workload, 1)
        assert measured.failure is not None
        assert measured.failure.kind in kinds
        assert "\n" not in measured.failure.message
        assert measured.tokens_per_s is None
        assert "tokens_per_s" in measured.unknown
        assert Measurement.model_validate_json(measured.model_dump_json()) == measured
        again = backend.measure(harness.chain, harness.workload, 2)
        if harness.backend.name == "engine":
            assert again.failure is None, again.failure
            assert again.output_check == "exact"

    def test_closing_leaves_nothing_behind_and_may_be_repeated(self, harness: Harness) -> None:
        harness.backend.close()
        before = children()
        listening = _listening()
        harness.backend.open(harness.backend.group(harness.plain))
        harness.backend.close()
        harness.backend.close()
        assert children() <= before
        assert _listening() <= listening
        with pytest.raises(RuntimeError, match="before open"):
            harness.backend.measure(harness.plain, harness.workload, 0)


def _listening() -> set[int]:
    """Ports on which this process or a child of it listens."""
    me = psutil.Process()
    ports = set()
    for process in (me, *me.children(recursive=True)):
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports


def test_listing_backends_imports_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from autotune.backends.registry import backend_names; print(backend_names());"
        "heavy = {'torch', 'triton', 'engine', 'optuna', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('engine', 'replay', 'sim')"
