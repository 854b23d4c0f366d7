"""The wall time of a study, on a clock that only repeats and starts move."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study_files import sim_study
from test_study_run import Fixture

from autotune.backends.sim_backend import SimBackend

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """Seconds since the study began; repeats and starts take what they are told to."""

    def __init__(self, repeat_s: float, start_s: float, spread: float = 0.0) -> None:
        self.now_s = 0.0
        self.longest_s = max(repeat_s, 0.0) * (1 + spread)
        self._repeat_s, self._start_s, self._spread = repeat_s, start_s, spread
        self._random = random.Random(7)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Every place that reads a clock for the budget reads this one."""
        ticking = SimpleNamespace(monotonic=lambda: self.now_s, sleep=lambda seconds: None)
        dated = SimpleNamespace(now=lambda zone: START + timedelta(seconds=self.now_s))
        patch.setattr("autotune.measuring.time", ticking)
        patch.setattr("autotune.study.time", ticking)
        patch.setattr("autotune.store.workers.datetime", dated)
        run_open, run_measure = SimBackend.open, SimBackend.measure

        def open_(backend: SimBackend, group: Any) -> None:
            self.now_s += self._start_s
            run_open(backend, group)

        def measure(backend: SimBackend, *args: Any) -> Any:
            jitter = 1 + self._spread * self._random.uniform(-1, 1)
            self.now_s += self._repeat_s * jitter
            return run_measure(backend, *args)

        patch.setattr(SimBackend, "open", open_)
        patch.setattr(SimBackend, "measure", measure)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def study_of(folder: Path, wall_time_s: float, **changes: Any) -> Fixture:
    budget = {"measured_trials": 40, "wall_time": f"{wall_time_s:.0f}s"}
    return Fixture(folder, budget=budget, **changes)


LEVELS = {"workload": {**sim_study()["workload"], "concurrency": [1, 4, 16]}}
GROUPS = {
    "space": {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": {"int": [1, 3]},
        "parallel.tp": 8,
        "cuda_graph.decode": True,
        "nccl.proto": ["auto", "LL", "Simple"],
    }
}
#: the fewest repeats that a study with a verdict takes at a level: baseline, A/A, trial, final
REFERENCES, TRIAL, FINAL = 8, 2, 8


@pytest.mark.parametrize(
    ("wall_time_s", "clock", "changes"),
    [
        pytest.param(300, Clock(10, 0), {}, id="one-level"),
        pytest.param(900, Clock(10, 0), LEVELS, id="three-levels"),
        pytest.param(700, Clock(10, 60), GROUPS, id="starts-of-a-minute"),
        pytest.param(2500, Clock(10, 120), {**LEVELS, **GROUPS}, id="levels-and-starts"),
        pytest.param(400, Clock(10, 0, spread=0.5), {}, id="uneven-repeats"),
    ],
)
def test_the_wall_time_holds_and_still_ends_with_a_comparison(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wall_time_s: float,
    clock: Clock,
    changes: dict[str, Any],
) -> None:
    clock.install(monkeypatch)
    study = study_of(tmp_path, wall_time_s, **changes)
    outcome = study.run()
    # a repeat that is longer than the mean may be in flight at the end
    assert clock.now_s <= wall_time_s + (clock.longest_s if clock._spread else 0.0)
    assert outcome.num_search_trials >= 1
    assert any(level.interleaved or level.ratio is None for level in outcome.levels)
    assert "wall time" in outcome.ended


@pytest.mark.parametrize("seed", range(4))
def test_every_repeat_that_fits_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    clock = Clock(10, 0)
    clock.install(monkeypatch)
    study = study_of(tmp_path, 350, seed=seed)
    study.run()
    # what is left is less than one more trial
    assert 350 - clock.now_s < TRIAL * 10 + 10


def test_without_time_for_a_comparison_it_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(10, 0)
    clock.install(monkeypatch)
    wall_time_s = (REFERENCES + TRIAL) * 10 + 30
    study = study_of(tmp_path, wall_time_s)
    outcome = study.run()
    assert clock.now_s <= wall_time_s
    assert "no wall time is left to compare" in study.output.getvalue()
    assert "autotune compare best baseline" in study.output.getvalue()
    assert all(level.verdict in ("undecided", "same") for level in outcome.levels)


def test_a_wall_time_shorter_than_the_references_ends_after_two_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(10, 0)
    clock.install(monkeypatch)
    study = study_of(tmp_path, 20)
    outcome = study.run()
    # the noise floor needs two pairs, and nothing else is begun
    assert clock.now_s == 40
    assert outcome.num_search_trials == 0
    assert "only the baseline was measured" in outcome.verdict()
