"""The loop of a study: baseline and A/A, then predict, pick, measure, calibrate; then the verdict.

Everything is in the database; a run holds nothing that a resume could not read back. Several
processes may run one study at once: they take work through unique claims.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from autotune.backends.base import Backend, BackendContext
from autotune.backends.registry import create_backend
from autotune.budget import BudgetKeeper
from autotune.claims import Claims
from autotune.history import History
from autotune.ledger import Ledger
from autotune.measuring import Bench, StopRequestedError
from autotune.modelling import StudyModel
from autotune.outcome import Outcome, conclude, goal_of, leaders, winners
from autotune.plan import Plan
from autotune.progress import Progress
from autotune.records import Failure, Measurement
from autotune.refusal import without_baseline
from autotune.search import Forecast, Proposal, Search
from autotune.starts import Starts
from autotune.statistics import noise_floor
from autotune.stopping import Heartbeat, StopFlag
from autotune.store.store import Store
from autotune.store.views import NoiseFloor, StudyView, TrialView
from autotune.store.workers import is_alive
from autotune.trial_values import level_weights, objective_values
from model.spec import Knobs, Prediction

#: a trial whose worker died this often is failed instead of tried again
_MAX_ATTEMPTS = 3
_POLL_S = 1.0


class StudyRun:
    """One process at work on one study."""

    def __init__(
        self, plan: Plan, view: StudyView, store: Store, progress: Progress, flag: StopFlag
    ) -> None:
        self.plan, self.view, self.store = plan, view, store
        self.progress, self.flag = progress, flag
        self.study, self.model = plan.study, plan.model
        self.ledger = Ledger(store.url, plan.study, plan.space, plan.baseline)
        self.worker_id = store.add_worker(view.id)
        self.budget = BudgetKeeper(plan.study, store, view.id, self.worker_id)
        self._trial_seconds: list[float] = []

    def run(self) -> Outcome:
        """Work until the budget is spent, the space is measured, or somebody stops the study.

        Raises ``UserError`` or ``AutotuneError`` when the baseline can't be measured.
        """
        self.store.set_state(self.view.id, "running", stop_requested=False)
        self.store.add_event(self.view.id, "session", {"worker": self.worker_id})
        log_dir = Path.cwd() / "autotune-logs" / self.study.name
        context = BackendContext(
            study=self.study,
            study_dir=self.plan.base_dir,
            machine=self.plan.machine,
            predictor=self.model.predictor,
            log_dir=log_dir,
        )
        state = "failed"
        backend: Backend | None = None
        try:
            with Heartbeat(self.store, self.view.id, self.worker_id, self.flag):
                backend = create_backend(self.study.backend.kind, context)
                ended = self._work(backend)
                state = "stopped" if ended.startswith("stopped") else "finished"
        finally:
            try:
                if backend is not None:
                    backend.close()
            finally:
                if state != "finished" or not self._others_alive():
                    self.store.set_state(self.view.id, state)
                self.store.heartbeat(self.worker_id, ended=True)
        outcome = conclude(self.store, self.view.id, self.study, ended)
        return outcome

    # the three parts

    def _work(self, backend: Backend) -> str:
        """References, exploration, final comparison; why it ended."""
        history = History.read(self.store, self.view.id)
        taken: dict[tuple[str, int], int] = {}
        for row in history.repeats:
            key = (row.knobs_id, row.concurrency)
            taken[key] = taken.get(key, 0) + 1
        self.bench = Bench(
            backend=backend,
            store=self.store,
            study_id=self.view.id,
            workloads=self.plan.workloads,
            measure=self.study.measure,
            check_stop=self.flag.check,
            on_repeat=self._on_repeat,
            num_taken=taken,
        )
        self.budget.bench = self.bench
        self.starts = Starts(self.study, self.plan.baseline, self.bench, self.budget)
        self.claims = Claims(
            self.store,
            self.ledger,
            self.view.id,
            self.worker_id,
            group_of=lambda knobs: backend.group(knobs).id,
        )
        self.claims.tidy(self.study)
        try:
            self.model.learn(self.store, self.view.id)
            self._references()
            warning = self.budget.too_short(History.read(self.store, self.view.id))
            if warning is not None and not history.num_finished:
                self.progress.note(warning)
            ended = self._explore(backend)
            self.model.learn(self.store, self.view.id, every=True)
            self._finals()
            self._wait_for_finals()
        except StopRequestedError as stop:
            return f"stopped: {stop}"
        return ended

    def _references(self) -> None:
        """Baseline and A/A pair in turns; the noise floor is their difference."""
        base = self.claims.take("baseline", "baseline", "plain decoding", self.plan.baseline)
        again = self.claims.take("aa", "aa", "the baseline again", self.plan.baseline)
        if base is None or again is None:
            self._wait_for_baseline()
            return
        if base.state == "complete" and again.state == "complete":
            self._show_floors()
            return
        self.progress.stage("baseline and A/A pair", self.plan.baseline)
        self._predict(base)
        failures = self._arms(base, again, 1)
        if failures == (None, None):
            failures = self._arms(base, again, self.budget.reference_pairs())
        for trial, failure in zip((base, again), failures, strict=True):
            self._finish(trial, failure)
        failure = failures[0] or failures[1]
        if failure is not None:
            for trial in (base, again):
                self._finish(trial, failure)
            raise without_baseline(failure)
        self._store_floors(base, again)
        self._show_floors()
        self.model.learn(self.store, self.view.id)

    def _arms(
        self, first: TrialView, second: TrialView, num_pairs: int, levels: list[int] | None = None
    ) -> tuple[Failure | None, Failure | None]:
        """Bring two arms to ``num_pairs`` repeats each, in turns, as far as the time goes."""
        done = History.read(self.store, self.view.id).repeats_of
        asked = levels or list(self.plan.workloads)
        return self.bench.run_arms(
            first, second, num_pairs, done, levels, lambda: self.budget.out_of_time(asked)
        )

    def _explore(self, backend: Backend) -> str:
        """Predict, pick, measure, calibrate until the budget or the space is used up."""
        search = Search(
            space=self.plan.space,
            baseline=self.plan.baseline,
            levels=self.study.workload.concurrency,
            weights=level_weights(self.study),
            seed=self.study.seed,
            metric=goal_of(self.study),
            forecaster=_Forecaster(self.model, goal_of(self.study).name),
            suggest=self.ledger.suggest,
            group_of=lambda knobs: backend.group(knobs).id,
        )
        while True:
            self.flag.check()
            self._adopt_orphans()
            history = History.read(self.store, self.view.id)
            spent = self.budget.spent(history, self.starts.final(history))
            if spent is not None:
                return spent
            open_group = None if self.bench.open_group is None else self.bench.open_group.id
            proposal = search.propose(
                history,
                open_group,
                may_open=self.starts.may_open(history),
                cost_ratio=self._cost_ratio(),
            )
            if proposal is None and not self.starts.in_time(history):
                return self.budget.time_used_up()
            if proposal is None:
                return search.exhausted()
            trial = self._claim_proposal(proposal, history)
            if trial is not None:
                self._run_trial(trial, history)

    def _finals(self) -> None:
        """Measure the best knobs against the baseline once more, in turns."""
        history = History.read(self.store, self.view.id)
        best = winners(history, self.study, self.plan.baseline)
        for index, (knobs_id, levels) in enumerate(best.items()):
            knobs = history.by_knobs[knobs_id].knobs
            starts = self.starts.of(knobs)
            # later winners have a right to their share of what is left
            pairs = self.budget.pairs_in_time(levels, starts, 1 / (len(best) - index))
            lacking = None if pairs else "wall time"
            if starts > self.budget.starts_left():
                lacking = "server start"
            if lacking is not None:
                where = ", ".join(map(str, levels))
                key = "wall_time" if lacking == "wall time" else "server_starts"
                self.progress.note(
                    f"no {lacking} is left to compare {knobs.label()}, the best at concurrency "
                    f"{where}, with the baseline in turns; raise budget.{key}, or use "
                    f"`autotune compare best baseline --study {self.study.name}`"
                )
                continue
            origin = f"final: best at {','.join(map(str, levels))}"
            ours = self.claims.take(f"final:{knobs_id}", "final", origin, knobs)
            if ours is None or ours.state != "running":
                continue
            claim, against = f"final-base:{knobs_id}", f"final: against {ours.number}"
            base = self.claims.take(claim, "final", against, self.plan.baseline)
            if base is None:
                continue
            self.progress.stage("best against baseline, in turns", knobs)
            failures = self._arms(ours, base, pairs, levels)
            for trial, failure in zip((ours, base), failures, strict=True):
                self._finish(trial, failure)

    # trials

    def _run_trial(self, trial: TrialView, history: History) -> None:
        """Predict, store the prediction, measure, finish, calibrate."""
        best = {
            level: result.summary(level).median  # type: ignore[union-attr]
            for level, result in leaders(history, self.study).items()
            if result.summary(level) is not None
        }
        predictions = self._predict(trial)
        self.progress.trial(
            trial, predictions, best, self.budget.time_left_s(), history.num_finished
        )
        started = time.monotonic()
        done = history.repeats_of.get(trial.id, ())
        kept_s = self.budget.final_s(history, self.starts.final(history))
        levels = tuple(self.plan.workloads)
        failure = self.bench.run_trial(
            trial, best, done, lambda: self.budget.out_of_time(levels[:1], kept_s)
        )
        self._finish(trial, failure)
        self._trial_seconds.append(time.monotonic() - started)
        self.model.learn(self.store, self.view.id)

    def _predict(self, trial: TrialView) -> dict[int, Prediction]:
        """What the model expects of a trial by level, stored before it is measured."""
        predictions = self.model.predict(trial.knobs)
        stored = self.store.predicted_levels(trial.id)
        for level, prediction in predictions.items():
            if level not in stored:
                self.store.add_prediction(trial.id, prediction)
        return predictions

    def _claim_proposal(self, proposal: Proposal, history: History) -> TrialView | None:
        known = history.by_knobs.get(proposal.knobs.id)
        count = 0 if known is None else len(known.trials)
        suffix = f":{count}" if proposal.role == "replicate" else ""
        claim = f"{proposal.role}:{proposal.knobs.id}{suffix}"
        return self.claims.take(claim, proposal.role, proposal.origin, proposal.knobs)

    def _adopt_orphans(self) -> None:
        """Go on with trials whose worker died; give up those that kill worker after worker."""
        for trial in self.store.trials(self.view.id):
            if trial.state != "running" or not self.claims.is_orphan(trial):
                continue
            if trial.role not in ("search", "replicate"):
                continue
            if not self.store.adopt_trial(trial.id, trial.worker_id, self.worker_id):
                continue
            if trial.attempts >= _MAX_ATTEMPTS:
                message = f"its worker died {trial.attempts} times"
                self._finish(trial, Failure(kind="crash", stage="measure", message=message))
                continue
            self.progress.note(f"goes on with trial {trial.number} of a worker that ended")
            self._run_trial(self.claims.trial(trial.id), History.read(self.store, self.view.id))

    def _finish(self, trial: TrialView, failure: Failure | None) -> None:
        if self.claims.trial(trial.id).state != "running":
            return
        self.store.finish_trial(trial.id, failure)
        history = History.read(self.store, self.view.id)
        values = None
        if failure is None:
            values = objective_values(history, self.study, trial.id)
        if failure is None:
            self.ledger.finish(trial.number, values)
        else:
            reason = f"{failure.kind} at {failure.stage}: {failure.message}"
            self.ledger.finish(trial.number, None, failure=reason)
        self.progress.finished(trial, history, failure)

    def _on_repeat(self, trial: TrialView, measurement: Measurement) -> None:
        self.progress.repeat(trial, measurement)

    def _others_alive(self) -> bool:
        now = datetime.now(UTC)
        others = (w for w in self.store.workers(self.view.id) if w.id != self.worker_id)
        return any(is_alive(worker, now) for worker in others)

    def _cost_ratio(self) -> float | None:
        """How many times dearer a trial gets when it needs a start."""
        if not self._trial_seconds or self.bench.num_opens == 0:
            return None
        start_s = self.bench.open_s / self.bench.num_opens
        trial_s = sum(self._trial_seconds) / len(self._trial_seconds)
        return (start_s + trial_s) / max(trial_s, 1e-9)

    # noise floor

    def _store_floors(self, first: TrialView, second: TrialView) -> None:
        history = History.read(self.store, self.view.id)
        for level in self.plan.workloads:
            a, b = (history.trial_values(t.id, level) for t in (first, second))
            n = min(len(a), len(b))
            if n >= 2:
                floor = noise_floor(a[:n], b[:n])
                self.store.set_noise_floor(self.view.id, NoiseFloor(level, floor, n))

    def _show_floors(self) -> None:
        self.progress.noise_floors(self.store.noise_floors(self.view.id))

    def _wait_for_baseline(self) -> None:
        """Another worker measures the baseline; wait until it is there, or take it over."""
        self.progress.note("another worker measures the baseline; waiting for it")
        while True:
            self.flag.check()
            running = [
                trial
                for trial in self.store.trials(self.view.id)
                if trial.role in ("baseline", "aa") and trial.state == "running"
            ]
            if not running:
                return
            if any(self.claims.is_orphan(trial) for trial in running):
                self._references()
                return
            time.sleep(_POLL_S)

    def _wait_for_finals(self) -> None:
        """Another worker compares the best with the baseline: without it there is no verdict."""
        told = False
        while True:
            self.flag.check()
            others = [
                trial
                for trial in self.store.trials(self.view.id)
                if trial.role == "final"
                and trial.state == "running"
                and trial.worker_id != self.worker_id
            ]
            if not others:
                return
            if any(self.claims.is_orphan(trial) for trial in others):
                # its claims are ours now, as far as the budget goes
                self._finals()
                return
            if not told:
                self.progress.note("another worker compares the best in turns; waiting for it")
                told = True
            time.sleep(_POLL_S)


class _Forecaster:
    """The study's model for the search; no model of a metric means no forecast."""

    def __init__(self, model: StudyModel, metric: str) -> None:
        self._model, self._metric = model, metric

    def forecast(self, knobs: Sequence[Knobs]) -> Forecast | None:
        return None if self._metric == "ttft_ms" else self._model.forecast(knobs)

    def why_not(self, knobs: Knobs) -> str | None:
        """The first reason of a level whose prediction says that these knobs can't run."""
        reasons = (one.infeasible_reason for one in self._model.predict(knobs).values())
        return next((reason for reason in reasons if reason is not None), None)
