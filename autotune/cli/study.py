"""``autotune study``: start, resume, stop, status, list, report, best."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.common import (
    DatabaseOption,
    JsonOption,
    database_url,
    print_json,
    stderr,
    stdout,
)
from autotune.errors import UserError
from autotune.store.store import Store
from autotune.store.views import StudyView
from autotune.study_file import load_study, parse_study

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(help="Name of the study.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where the best-config YAML goes.")
]

#: exit code of a study that Ctrl-C stopped
_INTERRUPTED = 130


@app.command()
def start(
    file: Annotated[Path, typer.Argument(help="Study file (YAML).")],
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Another name for the study.")] = None,
) -> None:
    """Start a study and work on it in the foreground.

    A study of this name that is there already is resumed when its file is the same.
    """
    from autotune.plan import create_study, make_plan, stored_plan

    loaded = load_study(file, name=name)
    url = database_url(database, loaded.study.database)
    plan = make_plan(loaded)
    store = Store.create(url)
    view = store.find_study(loaded.study.name)
    if view is None:
        view = create_study(loaded, plan, store)
    elif view.text != loaded.source.text:
        raise UserError(
            f"study {view.name!r} exists already in the database with another study file; resume "
            f"it with `autotune study resume {view.name}`, or start under another --name"
        )
    else:
        plan = stored_plan(view)
        stderr().print(f"study {view.name} is there already ({view.state}); going on with it")
    _work(plan, view, store, as_json, out)


@app.command()
def resume(
    name: NameArgument,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Go on with a study; a second process on the same study shares the work."""
    from autotune.plan import stored_plan

    store = Store.existing(database_url(database))
    view = store.study(name)
    _work(stored_plan(view), view, store, as_json, out)


def _work(plan: Any, view: StudyView, store: Store, as_json: bool, out: Path | None) -> None:
    """Run a study to its end, then show what it found."""
    from autotune.best import write_study_best
    from autotune.progress import Progress
    from autotune.report import outcome_mapping, outcome_table
    from autotune.stopping import StopFlag
    from autotune.study import StudyRun

    flag, console = StopFlag(), stderr()
    levels = plan.study.workload.concurrency
    console.print(
        f"study {view.name}: {plan.space.size} possible configurations, "
        f"{plan.study.budget.measured_trials} trials to measure; database "
        f"{store.engine.url.render_as_string(hide_password=True)}",
        soft_wrap=True,
    )
    for item in plan.space.inert:
        console.print(f"  inert: {item.knob}: {item.reason}", soft_wrap=True)
    progress = Progress(console, plan.study.budget.measured_trials, levels)
    with progress, flag.on_signals(progress.note):
        outcome = StudyRun(plan, view, store, progress, flag).run()
    values = outcome_mapping(outcome)
    if outcome.ended.startswith("stopped"):
        command = f"autotune study resume {view.name} --database {store.url}"
        console.print(
            f"{outcome.ended}; {outcome.num_repeats} repeats are stored; go on with: {command}",
            soft_wrap=True,
        )
        if as_json:
            print_json({**values, "best_config": None, "resume": command})
        raise typer.Exit(_INTERRUPTED if flag.reason in ("Ctrl-C", "SIGTERM") else 0)
    path = out or Path(f"{view.name}.best.yaml")
    written = write_study_best(path, plan, view, store, outcome)
    store.set_state(view.id, result={**values, "best_config": str(path)})
    if as_json:
        print_json({**values, "best_config": [str(item) for item in written]})
        return
    screen = stdout()
    screen.print(outcome_table(outcome))
    screen.print(f"{outcome.ended}; {outcome.verdict()}.", soft_wrap=True)
    screen.print(f"best config: {path}", soft_wrap=True)


@app.command()
def stop(name: NameArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Ask the processes that work on a study to stop after the repeat in flight."""
    from autotune.store.workers import is_alive

    store = Store.existing(database_url(database))
    view = store.study(name)
    now = datetime.now(UTC)
    alive = [worker for worker in store.workers(view.id) if is_alive(worker, now)]
    if alive:
        store.set_state(view.id, stop_requested=True)
    if as_json:
        print_json({"study": name, "asked": [f"{worker.host}:{worker.pid}" for worker in alive]})
    elif alive:
        who = ", ".join(f"process {worker.pid} on {worker.host}" for worker in alive)
        stdout().print(f"asked {who} to stop after the repeat in flight")
    else:
        stdout().print(f"nobody works on study {name} (state: {view.state})")


@app.command()
def status(
    name: NameArgument, database: DatabaseOption = None, as_json: JsonOption = False
) -> None:
    """Show how far a study is and who works on it."""
    store = Store.existing(database_url(database))
    values = _status(store, store.study(name))
    if as_json:
        print_json(values)
        return
    screen = stdout()
    for key, value in values.items():
        screen.print(f"{key.replace('_', ' ')}: {value}", soft_wrap=True)


@app.command("list")
def list_studies(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the studies of a database."""
    store = Store.existing(database_url(database))
    rows = [_status(store, view) for view in store.studies()]
    if as_json:
        print_json({"studies": rows})
        return
    from rich.table import Table

    table = Table()
    for column in ("study", "state", "trials", "repeats", "failed", "created (UTC)"):
        table.add_column(column)
    for row in rows:
        trials = f"{row['num_search_trials']}/{row['budget_trials']}"
        cells = (row["study"], row["state"], trials, row["num_repeats"], row["num_failed_trials"])
        table.add_row(*map(str, cells), str(row["created"])[:16])
    stdout().print(table)


@app.command()
def report(
    name: NameArgument, database: DatabaseOption = None, as_json: JsonOption = False
) -> None:
    """Show what a study found so far."""
    from autotune.outcome import conclude
    from autotune.report import outcome_mapping, outcome_table

    store = Store.existing(database_url(database))
    view = store.study(name)
    study = parse_study(view.text, view.label, view.base_dir, view.name).study
    outcome = conclude(store, view.id, study, f"study is {view.state}")
    if as_json:
        print_json(outcome_mapping(outcome))
        return
    screen = stdout()
    screen.print(outcome_table(outcome))
    screen.print(f"{outcome.ended}; {outcome.verdict()}.", soft_wrap=True)


@app.command()
def best(
    name: NameArgument,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Write the best-config YAML of a study."""
    from autotune.best import write_study_best
    from autotune.outcome import conclude
    from autotune.plan import stored_plan

    store = Store.existing(database_url(database))
    view = store.study(name)
    plan = stored_plan(view)
    outcome = conclude(store, view.id, plan.study, f"study is {view.state}")
    written = write_study_best(out or Path(f"{name}.best.yaml"), plan, view, store, outcome)
    if as_json:
        print_json({"study": name, "verdict": outcome.verdict(), "files": list(map(str, written))})
    else:
        stdout().print("\n".join(str(path) for path in written), soft_wrap=True)


def _status(store: Store, view: StudyView) -> dict[str, Any]:
    from autotune.history import History
    from autotune.store.workers import is_alive, worked_s

    history = History.read(store, view.id)
    workers, now = store.workers(view.id), datetime.now(UTC)
    alive = [worker for worker in workers if is_alive(worker, now)]
    state = view.state
    if state == "running" and not alive:
        state = f"interrupted (resume with `autotune study resume {view.name}`)"
    study = parse_study(view.text, view.label, view.base_dir, view.name).study
    return {
        "study": view.name,
        "state": state,
        "created": view.created.isoformat(),
        "num_search_trials": history.num_search_trials,
        "budget_trials": study.budget.measured_trials,
        "num_failed_trials": sum(trial.state == "failed" for trial in history.trials),
        "num_repeats": len(history.repeats),
        "server_starts": store.count_events(view.id, "open"),
        "worked_s": round(worked_s(workers), 1),
        "workers": [f"{worker.host}:{worker.pid}" for worker in alive],
    }
