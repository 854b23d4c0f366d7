"""``autotune dashboard``: a study in the browser, with the evidence of every trial."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.common import DatabaseOption, JsonOption, database_url, print_json, stderr
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.dashboard.publish import Publisher
    from autotune.store.store import Store
    from autotune.store.views import StudyView

#: while a study runs, how often its notes and plots are brought up to date
_REFRESH_S = 15.0


def dashboard(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[STUDY|DB]", help="A study's name, its file, or a database (file or URL)."
        ),
    ] = None,
    database: DatabaseOption = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any free one.")] = 8080,
    serve: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Only write notes and plots, then end.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Start optuna-dashboard on a study's database; Ctrl-C ends it.

    Before that every trial gets a note (knobs, predicted and measured speed, time per term, output
    check, failure, provenance) and the study its plots. While the study runs they are kept up to
    date.
    """
    from autotune.store.store import Store

    name, url = _resolve(what, database)
    store = Store.existing(url)
    views = [store.study(name)] if name is not None else store.studies()
    if not views:
        raise UserError(
            f"no study in {store.engine.url.render_as_string()}; start one with "
            "`autotune study start FILE`"
        )
    from autotune.dashboard.publish import Publisher
    from autotune.dashboard.server import Dashboard
    from autotune.dashboard.storage import open_storage, optuna_id

    storage = open_storage(store)
    publisher = Publisher(store, storage)
    # the port first: writing notes for nothing would be a waste of the reader's time
    server = Dashboard(storage, port) if serve else None
    try:
        for view in views:
            publisher.publish(view)
        page = f"/dashboard/studies/{optuna_id(storage, views[-1].name)}"
    except BaseException:
        if server is not None:
            server.close()
        raise
    address = None if server is None else server.url + (page if len(views) == 1 else "/dashboard")
    if as_json:
        print_json({"url": address, "studies": [view.name for view in views]})
        sys.stdout.flush()
    else:
        names = ", ".join(view.name for view in views)
        stderr().print(f"notes and plots written for {names}", soft_wrap=True)
        if address is not None:
            stderr().print(f"dashboard at {address} (Ctrl-C ends it)", soft_wrap=True)
    if server is not None:
        server.serve(lambda: _refresh(store, publisher, views), _REFRESH_S)
        stderr().print("dashboard stopped")


def _refresh(store: "Store", publisher: "Publisher", views: "list[StudyView]") -> bool:
    """Bring running studies up to date; False once none runs."""
    newest = [store.study(view.name) for view in views]
    running = [view for view in newest if view.state == "running"]
    # once more after the end, for what came last
    ended = [n for n, v in zip(newest, views, strict=True) if v.state == "running" != n.state]
    for view in (*running, *ended):
        publisher.publish(view)
    views[:] = newest
    return bool(running)


def _resolve(what: str | None, database: str | None) -> tuple[str | None, str]:
    """(study name or None for all, database URL) of the argument and --database."""
    if what is None:
        return None, database_url(database)
    path = Path(what)
    if path.suffix in (".yaml", ".yml"):
        from autotune.study_file import load_study

        study = load_study(path).study
        return study.name, database_url(database, study.database)
    if "://" in what or path.suffix in (".db", ".sqlite", ".sqlite3") or path.is_file():
        if database is not None:
            raise UserError(f"dashboard: {what} and --database {database} are two databases")
        return None, what
    return what, database_url(database)
