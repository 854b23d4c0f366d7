"""The loop on the simulated host: order of work, budgets, failures, verdict, resume."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from study_files import CPU_MACHINE, sim_study, write_study

from autotune.backends.base import BackendFailure
from autotune.backends.sim_backend import SimBackend
from autotune.errors import AutotuneError, UserError
from autotune.history import History
from autotune.outcome import Outcome, conclude
from autotune.plan import create_study, make_plan, stored_plan
from autotune.progress import Progress
from autotune.records import Failure
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.store.views import StudyView
from autotune.study import StudyRun
from autotune.study_file import load_study


class Fixture:
    """One study in a database of its own."""

    def __init__(self, folder: Path, **changes) -> None:
        loaded = load_study(write_study(folder, sim_study(**changes)))
        self.plan = make_plan(loaded)
        self.store = Store.create(f"sqlite:///{folder}/a.db")
        self.view: StudyView = create_study(loaded, self.plan, self.store)
        self.output = io.StringIO()
        self.flag = StopFlag()

    def run(self) -> Outcome:
        console = Console(file=self.output, width=200)
        plan = stored_plan(self.store.study(self.view.name))
        progress = Progress(console, plan.study.budget.measured_trials, (1,))
        return StudyRun(plan, self.view, self.store, progress, self.flag).run()

    def outcome(self) -> Outcome:
        return conclude(self.store, self.view.id, self.plan.study, "read")

    @property
    def history(self) -> History:
        return History.read(self.store, self.view.id)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """A study that ran to its end; tests only read it."""
    study = Fixture(tmp_path_factory.mktemp("finished"), budget={"measured_trials": 5})
    study.run()
    return study


def test_a_study_measures_baseline_and_aa_first_in_turns_and_the_winner_last(finished) -> None:
    study, outcome = finished, finished.outcome()
    history = study.history
    roles = [trial.role for trial in history.trials]
    assert roles[:2] == ["baseline", "aa"]
    assert roles[2:5] == ["search"] * 3
    assert set(roles[7:]) <= {"final"}
    order = [row.trial_id for row in history.repeats[:4]]
    base, again = history.trials[0].id, history.trials[1].id
    assert order == [base, again, again, base]
    assert study.store.noise_floors(study.view.id)[1].rel_floor > 0
    assert outcome.num_search_trials == 5
    assert outcome.levels[0].interleaved
    assert outcome.levels[0].verdict in ("faster", "slower", "same", "undecided")
    assert study.store.study("sim").state == "finished"


def test_predictions_are_stored_before_the_repeats_they_predict(finished) -> None:
    study = finished
    predictions = study.store.predictions(study.view.id)
    searched = [trial for trial in study.history.trials if trial.role == "search"]
    assert all(set(predictions[trial.id]) == {1} for trial in searched)


def test_every_trial_is_optunas_trial_with_its_value(finished) -> None:
    import optuna

    study = finished
    stored = optuna.load_study(study_name="sim", storage=study.store.url)
    by_number = {trial.number: trial for trial in stored.trials}
    for trial in study.history.trials:
        mirrored = by_number[trial.number]
        assert mirrored.state == optuna.trial.TrialState.COMPLETE
        assert mirrored.user_attrs["knobs_id"] == trial.knobs.id
        assert mirrored.params["speculation.steps"] == trial.knobs.steps
        values = sorted(study.history.trial_values(trial.id, 1))
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        assert mirrored.value == pytest.approx(middle)


def test_calibrations_form_a_chain_from_the_prior(finished) -> None:
    study = finished
    records = study.store.calibrations(study.view.id)
    assert len(records) >= 4
    assert records[0]["parent"] is None
    assert [r["parent"] for r in records[1:]] == [r["id"] for r in records[:-1]]


def test_calibration_brings_the_prediction_of_measured_knobs_to_the_measurement(finished) -> None:
    plan = stored_plan(finished.store.study("sim"))
    before = plan.model.predict(plan.baseline)[1].tokens_per_s.median
    measured = finished.history.baseline.summary(1).median
    plan.model.learn(finished.store, finished.view.id)
    after = plan.model.predict(plan.baseline)[1].tokens_per_s.median
    assert abs(after / measured - 1) < 0.15
    assert abs(after / measured - 1) < abs(before / measured - 1)


def test_a_space_without_anything_better_says_that_the_baseline_wins(tmp_path) -> None:
    space = {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": [6],
        "parallel.tp": 8,
        "cuda_graph.decode": True,
    }
    workload = {
        "prompts": "builtin:text",
        "input_len": 500,
        "output_len": 32,
        "concurrency": [64],
    }
    study = Fixture(tmp_path, space=space, workload=workload)
    outcome = study.run()
    assert not outcome.anything_won
    assert "beat" in outcome.verdict()
    assert "nothing" in outcome.verdict()


def test_a_wrong_output_fails_its_trial_and_cannot_win(tmp_path) -> None:
    args = {"failures": {"incorrect": 1.0}, "slow_host_share": 0.0}
    study = Fixture(tmp_path, backend={"kind": "sim", "args": args})
    outcome = study.run()
    failed = [trial for trial in study.history.trials if trial.state == "failed"]
    assert failed
    assert {trial.failure_kind for trial in failed} == {"incorrect"}
    assert all(trial.knobs.method == "eagle3" for trial in failed)
    assert outcome.levels[0].knobs.method == "off"
    kinds = {stored.failure.kind for stored in study.store.failures(study.view.id)}
    assert kinds == {"incorrect"}
    assert "failed: incorrect" in study.output.getvalue()


def test_failures_are_not_proposed_again(tmp_path) -> None:
    args = {"failures": {"oom": 0.6}, "slow_host_share": 0.0}
    budget = {"measured_trials": 8}
    study = Fixture(tmp_path, backend={"kind": "sim", "args": args}, budget=budget)
    study.run()
    searched = [t.knobs.id for t in study.history.trials if t.role == "search"]
    assert len(set(searched)) == len(searched)
    assert any(trial.failure_kind == "oom" for trial in study.history.trials)


@pytest.mark.parametrize(
    ("kind", "error"), [("invalid", UserError), ("oom", AutotuneError), ("crash", AutotuneError)]
)
def test_a_baseline_that_cannot_be_measured_ends_the_study(
    tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[AutotuneError]
) -> None:
    failure = Failure(kind=kind, stage="start", message="no such thing")

    def refuse(self, group) -> None:
        raise BackendFailure(failure)

    monkeypatch.setattr(SimBackend, "open", refuse)
    study = Fixture(tmp_path)
    with pytest.raises(error, match=f"the baseline can't be measured: {kind} at start") as caught:
        study.run()
    assert caught.value.exit_code == error.exit_code
    assert study.store.study("sim").state == "failed"


def test_server_starts_are_counted_and_never_exceeded(tmp_path) -> None:
    space = {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": [1, 2],
        "parallel.tp": 8,
        "cuda_graph.decode": True,
        "nccl.proto": ["auto", "LL", "Simple"],
    }
    budget = {"measured_trials": 8, "server_starts": 2}
    study = Fixture(tmp_path, space=space, budget=budget)
    study.run()
    assert study.store.count_events(study.view.id, "open") <= 2


def test_a_stop_keeps_every_repeat_and_a_resume_takes_none_twice(tmp_path) -> None:
    study = Fixture(tmp_path)
    run_repeat = SimBackend.measure
    taken = []

    def measure(self, knobs, workload, repeat):
        taken.append((knobs.id, repeat))
        if len(taken) == 9:
            study.flag.reason = "Ctrl-C"
        return run_repeat(self, knobs, workload, repeat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimBackend, "measure", measure)
        outcome = study.run()
        assert outcome.ended == "stopped: Ctrl-C"
        assert len(study.history.repeats) == 9
        assert study.store.study("sim").state == "stopped"
        study.flag.reason = None
        assert study.run().ended.startswith("budget")
    assert len(study.history.repeats) == len(taken)
    assert len(set(taken)) == len(taken)
    assert all(trial.state == "complete" for trial in study.history.trials)


def test_a_finished_study_measures_nothing_more(finished) -> None:
    count, first = len(finished.history.repeats), finished.outcome()
    second = finished.run()
    assert len(finished.history.repeats) == count
    assert second.levels == first.levels


def test_the_winner_is_reported_from_repeats_taken_after_it_was_chosen(finished) -> None:
    level = finished.outcome().levels[0]
    assert level.knobs != finished.plan.baseline
    final = next(t for t in finished.history.trials if t.origin.startswith("final: best"))
    values = finished.history.trial_values(final.id, 1)
    assert min(values) <= level.best.median <= max(values)
    assert level.best.n == len(values)
    assert level.trial != final.number


def test_a_weighted_objective_is_one_value_relative_to_the_baseline(tmp_path) -> None:
    import optuna

    workload = {
        "prompts": "builtin:code",
        "input_len": 500,
        "output_len": 32,
        "concurrency": [1, 8],
    }
    objective = {"maximize": "tokens_per_s", "weights": {1: 1.0, 8: 3.0}}
    study = Fixture(tmp_path, workload=workload, objective=objective)
    outcome = study.run()
    stored = optuna.load_study(study_name="sim", storage=study.store.url)
    assert len(stored.directions) == 1
    assert stored.trials[0].value == pytest.approx(1.0, abs=0.1)
    assert len(outcome.levels) == 2


def test_a_shape_that_does_not_exist_lists_the_known_ones(tmp_path) -> None:
    with pytest.raises(UserError, match=r"target: shape 'x' is unknown; known: .*mixtral"):
        Fixture(tmp_path, target={"shape": "x", "weights": "random"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"target": {"path": "absent"}}, "target: no folder .*absent", id="target"),
        pytest.param({"draft": {"path": "absent"}}, "draft: no folder .*absent", id="draft"),
        pytest.param({"machine": "absent.yaml"}, "machine: .*absent.yaml", id="machine"),
        pytest.param({"backend": {"kind": "vllmm"}}, "unknown backend 'vllmm'; known: ", id="kind"),
        pytest.param(
            {"backend": {"kind": "sim", "args": {"sed": 1}}}, "backend.args.sed", id="argument"
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_is_measured(
    tmp_path, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Fixture(tmp_path, **changes).run()
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_target_is_refused(tmp_path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    config = (
        '{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "target_hidden_size": 64,'
        ' "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "intermediate_size": 128, "vocab_size": 100, "draft_vocab_size": 50}'
    )
    (folder / "config.json").write_text(config)
    with pytest.raises(UserError, match="draft: "):
        Fixture(tmp_path, draft={"path": str(folder)})


def test_prompts_beyond_the_models_context_are_refused(tmp_path) -> None:
    workload = {
        "prompts": "builtin:code",
        "input_len": 10_000_000,
        "output_len": 32,
        "concurrency": [1],
    }
    with pytest.raises(UserError, match=r"workload: input_len 10000000 \+ output_len 32"):
        Fixture(tmp_path, workload=workload)


def test_a_cpu_machine_reports_gpu_knobs_as_inert(tmp_path) -> None:
    space = {**sim_study()["space"], "parallel.tp": 2, "collectives.backend": "gloo"}
    study = Fixture(tmp_path, machine=str(CPU_MACHINE), space=space)
    assert {item.knob for item in study.plan.space.inert} == {
        "cuda_graph.verify",
        "cuda_graph.decode",
    }


def test_conclude_before_anything_is_measured_says_so(tmp_path) -> None:
    study = Fixture(tmp_path)
    outcome = conclude(study.store, study.view.id, study.plan.study, "new")
    assert outcome.levels == ()
    assert "yet" in outcome.verdict()
