"""The recordings of H200 that are shipped: whole, healthy, and searched well."""

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

STUDIES = ROOT / "studies"


@pytest.mark.parametrize(
    ("name", "num_gpus", "repeats"),
    [
        pytest.param("h200-replay", 1, 2, id="one-gpu"),
        pytest.param("h200-replay-2x", 2, 1, id="two-gpus-through-host-memory"),
    ],
)
def test_a_shipped_recording_holds_every_configuration_of_its_study_and_a_healthy_host(
    name: str, num_gpus: int, repeats: int
) -> None:
    loaded = load_study(STUDIES / f"{name}.yaml")
    recording = read_recording(loaded.base_dir / loaded.study.backend.args["path"])
    assert recording.provenance is not None
    assert ["H200" in gpu for gpu in recording.provenance.gpus] == [True] * num_gpus
    pool, baseline = all_knobs(loaded.study)
    taken = Counter((r.knobs.id, r.workload.concurrency) for r in recording.repeats)
    levels = loaded.study.workload.concurrency
    assert set(taken) == {(knobs.id, level) for knobs in pool for level in levels}
    assert min(taken.values()) == repeats
    records = [r.measurement for r in recording.repeats]
    assert all(record.failure is None for record in records)
    assert [record.order for record in records] == list(range(len(records)))
    assert not [found for found in watch_repeats(records) if found.severity == "error"]
    plain = [r.measurement for r in recording.repeats if r.knobs.id == baseline.id]
    assert {record.accept_length for record in plain} == {1.0}


def test_the_recording_of_two_gpus_shows_what_carried_each_groups_sums() -> None:
    loaded = load_study(STUDIES / "h200-replay-2x.yaml")
    recording = read_recording(loaded.base_dir / loaded.study.backend.args["path"])
    assert recording.provenance is not None
    nccl = recording.provenance.nccl
    assert nccl["transports"] == ["SHM"]
    groups = nccl["groups"]
    assert isinstance(groups, list)
    by_proto: dict[str, set[str]] = {}
    for group in groups:
        chosen = {choice["proto"] for choice in group["nccl"]["allreduce_choices"]}
        by_proto.setdefault(group["settings"]["nccl.proto"], set()).update(chosen)
    assert by_proto == {"auto": {"LL"}, "LL": {"LL"}, "Simple": {"SIMPLE"}}


@pytest.mark.parametrize("name", ["h200-replay", "h200-replay-2x"])
def test_the_search_finds_a_configuration_near_the_best_recorded_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_study(STUDIES / f"{name}.yaml")
    recording = read_recording(loaded.base_dir / loaded.study.backend.args["path"])
    truth = Truth.of(recording, lossless=loaded.study.constraints.lossless)
    curve, _ = searched(loaded, 0, truth)
    assert 0 < len(curve) <= loaded.study.budget.measured_trials
    assert curve[-1] > 0.95
