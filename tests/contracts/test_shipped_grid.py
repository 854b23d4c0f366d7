"""The recording of one H200 that is shipped: whole, healthy, and searched well."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from contract_harness import ROOT

from autotune.backends.recording import read_recording
from autotune.health_rules import watch_repeats
from autotune.study_file import load_study

sys.path.insert(0, str(ROOT))
from bench.record_grid import all_knobs
from bench.replay_search import Truth, searched

SHIPPED = ROOT / "studies" / "h200-replay.yaml"


def test_the_shipped_recording_holds_every_configuration_of_its_study_and_a_healthy_host() -> None:
    loaded = load_study(SHIPPED)
    recording = read_recording(loaded.base_dir / loaded.study.backend.args["path"])
    assert recording.provenance is not None
    assert "H200" in recording.provenance.gpus[0]
    pool, baseline = all_knobs(loaded.study)
    taken = Counter((r.knobs.id, r.workload.concurrency) for r in recording.repeats)
    levels = loaded.study.workload.concurrency
    assert set(taken) == {(knobs.id, level) for knobs in pool for level in levels}
    assert min(taken.values()) >= 2
    records = [r.measurement for r in recording.repeats]
    assert all(record.failure is None for record in records)
    assert [record.order for record in records] == list(range(len(records)))
    assert not [found for found in watch_repeats(records) if found.severity == "error"]
    plain = [r.measurement for r in recording.repeats if r.knobs.id == baseline.id]
    assert {record.accept_length for record in plain} == {1.0}


def test_the_search_finds_a_configuration_near_the_best_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_study(SHIPPED)
    recording = read_recording(loaded.base_dir / loaded.study.backend.args["path"])
    curve, _ = searched(loaded, 0, Truth.of(recording))
    assert 0 < len(curve) <= loaded.study.budget.measured_trials
    assert curve[-1] > 0.95
