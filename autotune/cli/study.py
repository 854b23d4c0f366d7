"""``autotune study``: start, resume, stop, status, list, report, best."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from autotune.cli.common import (
    DatabaseOption,
    JsonOption,
    check_output,
    database_url,
    print_json,
    stderr,
    stdout,
)
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.store.store import Store
    from autotune.store.views import StudyView

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
    from autotune.plan import check_backend, create_or_join, make_plan, set_aside, stored_plan
    from autotune.store.store import Store
    from autotune.study_file import load_study

    loaded = load_study(file, name=name)
    check_output(out or Path(f"{loaded.study.name}.best.yaml"))
    url = database_url(database, loaded.study.database)
    # a study that can't work leaves no database behind
    view = Store.create(url).find_study(loaded.study.name) if Store.is_there(url) else None
    if view is not None and view.text != loaded.source.text:
        aside = set_aside(view, Store.create(url))
        if aside is None:
            _refuse_other_file(view.name)
        stderr().print(f"nothing was measured in study {view.name} before; kept as {aside}")
        view = None
    if view is None:
        if loaded.study.machine == "auto":
            stderr().print("machine: auto: measuring memory and launches of this host")
        plan = make_plan(loaded)
        check_backend(plan)
        view, created = create_or_join(loaded, plan, store := Store.create(url))
    else:
        store, created = Store.create(url), False
    if not created:
        if view.text != loaded.source.text:
            _refuse_other_file(view.name)
        plan = stored_plan(view)
        check_backend(plan)
        stderr().print(f"study {view.name} is there already ({view.state}); going on with it")
    _work(plan, view, store, as_json, out)


def _existing(database: str | None) -> "Store":
    # here, because SQLAlchemy takes longer to import than most commands take to answer
    from autotune.store.store import Store

    return Store.existing(database_url(database))


def _refuse_other_file(name: str) -> NoReturn:
    raise UserError(
        f"study {name!r} exists already in the database with another study file; resume "
        f"it with `autotune study resume {name}`, or start under another --name"
    )


@app.command()
def resume(
    name: NameArgument,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Go on with a study; a second process on the same study shares the work."""
    from autotune.plan import check_backend, stored_plan

    store = _existing(database)
    view = store.study(name)
    plan = stored_plan(view)
    check_backend(plan)
    _work(plan, view, store, as_json, out)


def _work(plan: Any, view: "StudyView", store: "Store", as_json: bool, out: Path | None) -> None:
    """Run a study to its end, then show what it found."""
    from autotune.best import write_study_best
    from autotune.ledger import ledger_errors
    from autotune.progress import Progress
    from autotune.report import outcome_mapping, show_outcome
    from autotune.stopping import StopFlag
    from autotune.study import StudyRun

    path = out or Path(f"{view.name}.best.yaml")
    check_output(path)
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
    for reason, count in plan.space.dropped.items():
        plural = "" if count == 1 else "s"
        console.print(f"  left out: {count} combination{plural}: {reason}", soft_wrap=True)
    for knob, values in plan.space.unused.items():
        shown = ", ".join(map(str, values))
        console.print(f"  left out: {knob} {shown}: no possible combination", soft_wrap=True)
    progress = Progress(console, plan.study.budget.measured_trials, levels)
    with progress, flag.on_signals(progress.note), ledger_errors(store.engine.url):
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
    written = write_study_best(path, plan, view, store, outcome)
    store.set_state(view.id, result={**values, "best_config": str(path)})
    if as_json:
        print_json({**values, "best_config": [str(item) for item in written]})
        return
    screen = stdout()
    show_outcome(outcome, screen)
    screen.print(f"best config: {path}", soft_wrap=True)


@contextmanager
def _stopped_while_waiting(study: str) -> Iterator[None]:
    """The study itself turns a stop into a result; before it began there is none."""
    from autotune.measuring import StopRequestedError

    try:
        yield
    except StopRequestedError as stop:
        stderr().print(f"study {study}: {stop} while waiting for the machine; nothing was measured")
        raise typer.Exit(_INTERRUPTED) from None


@app.command()
def stop(name: NameArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Ask the processes that work on a study to stop after the repeat in flight."""
    from autotune.store.workers import is_alive

    store = _existing(database)
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
    store = _existing(database)
    values = _status(store, store.study(name))
    if as_json:
        print_json(values)
        return
    screen = stdout()
    for line in _status_lines(values):
        screen.print(line, soft_wrap=True, markup=False)


@app.command("list")
def list_studies(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the studies of a database."""
    store = _existing(database)
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
    name: NameArgument,
    form: Annotated[
        str | None, typer.Option("--format", "-f", help="html, md or json; else a short table.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; its suffix can be the format."),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a study found so far, in short or as a whole report."""
    from autotune.outcome import conclude
    from autotune.report import outcome_mapping, show_outcome
    from autotune.study_file import parse_study

    chosen = _report_format(form, out)
    store = _existing(database)
    view = store.study(name)
    if chosen is not None:
        _write_report(store, view, chosen, out, as_json)
        return
    study = parse_study(view.text, view.label, view.base_dir, view.name).study
    outcome = conclude(store, view.id, study, f"study is {view.state}")
    if as_json:
        print_json(outcome_mapping(outcome))
    else:
        show_outcome(outcome, stdout())


def _report_format(form: str | None, out: Path | None) -> str | None:
    """The format asked for, or that of the file's suffix; None for the short table."""
    by_suffix = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}
    if form is not None:
        if form not in by_suffix.values():
            raise UserError(f"--format {form!r} is unknown; known: html, md, json")
        return form
    if out is None:
        return None
    if out.suffix.lower() not in by_suffix:
        raise UserError(f"--out {out}: name it .html, .md or .json, or give --format")
    return by_suffix[out.suffix.lower()]


def _write_report(
    store: "Store", view: "StudyView", form: str, out: Path | None, as_json: bool
) -> None:
    import json

    from autotune.reporting.content import gather

    found = gather(store, view)
    if form == "html":
        from autotune.reporting.page import page

        text = page(found)
        # nobody reads HTML on a terminal
        out = out or Path(f"{view.name}.report.html")
    elif form == "md":
        from autotune.reporting.markdown import markdown

        text = markdown(found)
    else:
        from autotune.reporting.values import report_mapping

        text = json.dumps(report_mapping(found), indent=2, default=str) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: can't be written: {error.strerror}") from None
    if as_json:
        print_json({"study": view.name, "format": form, "file": str(out), "bytes": len(text)})
    else:
        stdout().print(f"report: {out}", soft_wrap=True)


@app.command()
def best(
    name: NameArgument,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
    trial: Annotated[
        int | None,
        typer.Option(min=0, help="Export the knobs of this trial (of the Pareto front) instead."),
    ] = None,
) -> None:
    """Write the best-config YAML of a study."""
    from autotune.best import write_study_best
    from autotune.outcome import conclude
    from autotune.plan import stored_plan

    path = out or Path(f"{name}.best.yaml")
    store = _existing(database)
    view = store.study(name)
    check_output(path)
    plan = stored_plan(view)
    outcome = conclude(store, view.id, plan.study, f"study is {view.state}")
    written = write_study_best(path, plan, view, store, outcome, trial)
    if as_json:
        print_json({"study": name, "verdict": outcome.verdict(), "files": list(map(str, written))})
    else:
        stdout().print("\n".join(str(path) for path in written), soft_wrap=True)


def _status_lines(values: Mapping[str, Any]) -> list[str]:
    """The same for a reader."""
    from autotune.progress import duration

    failed, starts = values["num_failed_trials"], values["server_starts"]
    created = datetime.fromisoformat(values["created"])
    return [
        f"study {values['study']}: {values['state']}",
        f"{values['num_search_trials']} of {values['budget_trials']} trials, {failed} failed; "
        f"{values['num_repeats']} repeats, {starts} server start{'' if starts == 1 else 's'}",
        f"begun {created:%Y-%m-%d %H:%M} UTC, worked on for {duration(values['worked_s'])}",
        f"workers: {', '.join(values['workers']) or 'none now'}",
    ]


def _status(store: "Store", view: "StudyView") -> dict[str, Any]:
    from autotune.history import History
    from autotune.store.workers import is_alive, worked_s
    from autotune.study_file import parse_study

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
