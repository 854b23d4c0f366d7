"""Several objectives: the front, how one of it is picked, and how another is exported."""

import io
import json
from pathlib import Path

import optuna
import pytest
import yaml
from rich.console import Console
from study_files import sim_study
from test_study_run import Fixture

from autotune.best import write_study_best
from autotune.cli.main import main
from autotune.errors import UserError
from autotune.report import outcome_mapping, show_outcome

OBJECTIVE = {"maximize": "tokens_per_s", "minimize": "ttft_ms"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    folder = tmp_path_factory.mktemp("pareto")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        study = Fixture(folder, objective=OBJECTIVE, budget={"measured_trials": 8})
        study.run()
    return study


def test_with_one_concurrency_the_front_is_optunas_best_trials(measured: Fixture) -> None:
    storage = optuna.storages.RDBStorage(measured.store.url)
    theirs = optuna.load_study(study_name="sim", storage=storage).best_trials
    by_number = {trial.number: trial.knobs.id for trial in measured.history.trials}
    (front,) = measured.outcome().fronts
    ours = {point.knobs_id for point in front.points}
    # Optuna compares trials, we compare all repeats of knobs: a final trial may differ from both
    alone = {by_number[t.number] for t in theirs}
    assert ours & alone
    # what is exported may be beaten by medians over all repeats, and says so
    best = [point for point in front.points if not point.beaten_by]
    assert len(best) == front.num_best
    speeds = [point.metrics["tokens_per_s"].median for point in best]
    waits = [point.metrics["ttft_ms"].median for point in best]
    assert speeds == sorted(speeds, reverse=True)
    assert waits == sorted(waits, reverse=True)


def test_no_configuration_off_the_front_is_undominated(measured: Fixture) -> None:
    (front,) = measured.outcome().fronts
    points = {p.knobs_id: (p.metrics["tokens_per_s"].median, p.metrics["ttft_ms"].median)
              for p in front.points}  # fmt: skip
    for knobs_id, result in measured.history.by_knobs.items():
        speed, wait = result.summary(1), result.summary(1, "ttft_ms")
        if knobs_id in points or speed is None or wait is None:
            continue
        assert any(s >= speed.median and w <= wait.median for s, w in points.values())


def test_people_and_programs_see_the_front_and_how_one_is_picked(measured: Fixture) -> None:
    outcome, output = measured.outcome(), io.StringIO()
    show_outcome(outcome, Console(file=output, width=180))
    text = output.getvalue()
    assert "Pareto front at concurrency 1" in text
    assert "autotune study best sim --trial N" in text
    (front,) = outcome_mapping(outcome)["pareto_fronts"]
    assert [point["trial"] for point in front["points"]]
    assert sum(point["picked"] for point in front["points"]) <= 1


def test_another_trial_of_the_front_is_exported(measured: Fixture, tmp_path: Path) -> None:
    outcome = measured.outcome()
    (front,) = outcome.fronts
    other = next(point for point in front.points if not point.picked)
    path = tmp_path / "best.yaml"
    write_study_best(path, measured.plan, measured.view, measured.store, outcome, other.trial)
    evidence = yaml.safe_load(path.read_text())["evidence"]
    assert evidence["levels"][0]["knobs_id"] == other.knobs_id
    assert evidence["picked"] == f"trial {other.trial}, asked for with --trial"
    write_study_best(path, measured.plan, measured.view, measured.store, outcome)
    evidence = yaml.safe_load(path.read_text())["evidence"]
    assert "first of several objectives decides" in evidence["picked"]
    picked = [point.knobs_id for point in front.points if point.picked]
    assert evidence["levels"][0]["knobs_id"] in (*picked, measured.plan.baseline.id)


def test_a_trial_that_is_not_there_is_refused(
    measured: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"--trial 99: there is no such trial; .* 0 to \d+"):
        write_study_best(
            tmp_path / "b.yaml", measured.plan, measured.view, measured.store,
            measured.outcome(), 99,
        )  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(["study", "best", "sim", "--trial", "99", "--database", measured.store.url,
              "--out", str(tmp_path / "b.yaml"), "--json"])  # fmt: skip
    assert end.value.code == 2
    assert "no such trial" in json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "b.yaml").exists()


def test_one_objective_has_no_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = Fixture(tmp_path, budget={"measured_trials": 1}, workload=sim_study()["workload"])
    assert study.run().fronts == ()
