"""What commands load and ask before they answer: counted, since seconds depend on the host."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from explain_database import add_trial, fill, make_study
from sqlalchemy import Engine, event

from autotune.diff.compare import compare
from autotune.diff.resolve import Resolver
from autotune.explain.explanation import explain
from autotune.explain.stored import open_study, trial_subject
from autotune.history import History
from autotune.outcome import leaders
from autotune.store.store import Store

ROOT = Path(__file__).parents[2]
LAUNCH = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-235B-A22B --tp 8 "
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 16"
)
LINT = (
    "lint", "--engine", "sglang", "--args", LAUNCH, "--env", "NCCL_ALGO=Ring NCCL_P2P_LEVEL=SYS",
    "--machine", "8x-rtx-pro-6000-switches", "--target", "qwen3-235b-a22b",
)  # fmt: skip
#: what takes long to import and answers none of these questions
HEAVY = (
    "torch", "scipy", "optuna", "alembic", "plotly", "networkx", "simpy", "transformers", "psutil",
    "autotune.search", "autotune.probe.run", "autotune.doctor.facts", "autotune.nccl_log",
    "sqlalchemy.orm",
)  # fmt: skip
_LOADED = """
import json, sys
from autotune.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def loaded_by(words: Sequence[str]) -> set[str]:
    """Modules of a fresh process after a command."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # lint ends with 1 when it finds an error, which the line contains
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(found)


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Measurements -> URL of a database that holds so many."""
    urls = {}
    for count in (200, 1600):
        made = make_study(tmp_path_factory.mktemp("made"))
        add_trial(made, made.plan.baseline, role="baseline")
        fill(made, count, repeats=20)
        urls[count] = str(made.store.url)
        made.store.close()
    return urls


def test_lint_loads_nothing_of_databases_or_logs() -> None:
    loaded = loaded_by(LINT)
    assert not loaded & {*HEAVY, "sqlalchemy", "rich.table", "autotune.records"}
    # the cases where the model is asked at all
    assert "model.predictor" in loaded


@pytest.mark.parametrize("words", [["explain", "5"], ["diff", "0", "5"]], ids=["explain", "diff"])
def test_explain_and_diff_load_no_search_probe_or_doctor(
    words: list[str], databases: dict[int, str]
) -> None:
    assert not loaded_by([*words, "--database", databases[200]]) & set(HEAVY)


@pytest.mark.parametrize("question", ["explain", "diff"])
def test_a_larger_database_is_asked_as_often_and_few_records_are_read(
    question: str, databases: dict[int, str]
) -> None:
    asked: dict[int, list[str]] = {}
    for count, url in databases.items():
        store = Store.existing(url)
        statements = asked[count] = []

        @event.listens_for(Engine, "before_cursor_execute")
        def _keep(
            _connection: object,
            _cursor: object,
            statement: str,
            parameters: object,
            _context: object,
            _many: bool,
            statements: list[str] = statements,
        ) -> None:
            statements.append(statement)

        try:
            if question == "explain":
                context = open_study(store, "made")
                explain(trial_subject(context, context.trial("5"), None))
            else:
                resolver = Resolver(url, "made")
                compare(resolver.run("0"), resolver.run("5"))
        finally:
            event.remove(Engine, "before_cursor_execute", _keep)
            store.close()
    few, many = asked.values()
    assert len(few) == len(many) <= 60
    whole = [s for s in many if "measurement.record" in s]
    # whole records: those of single trials, a fixed number, or the first of each trial
    limits = ("trial_id IN", "trial_id = ?", "LIMIT", "min(autotune_measurement.id)")
    assert [s for s in whole if not any(limit in s for limit in limits)] == []
    assert whole


def test_the_best_knobs_are_found_without_an_interval_for_each(
    databases: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.existing(databases[200])
    context = open_study(store, "made")
    history = History.read(store, context.view.id)
    made: list[int] = []
    monkeypatch.setattr("autotune.history.summarise", lambda *_, **__: made.append(1))
    found = leaders(history, context.study)
    store.close()
    assert set(found) == set(context.study.workload.concurrency)
    assert len(history.by_knobs) > 1
    assert made == []
