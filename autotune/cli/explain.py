"""``autotune explain``: where the time goes, what could be faster, what cannot matter."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.common import DatabaseOption, JsonOption, database_url, print_json
from autotune.errors import AutotuneError, UserError

if TYPE_CHECKING:
    from autotune.explain.subject import Subject


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TRIAL|CONFIG",
            help="Trial number or knobs id of a study, or a best-config, launch or study YAML.",
        ),
    ],
    study: Annotated[
        str | None, typer.Option("--study", "-s", help="Name of the study; else the newest.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="One level only.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="For a launch config: a machine file or a shipped name.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a trial, or predict a configuration, term by term."""
    from autotune.explain.explanation import explain as explain_subject
    from autotune.explain.render import show, to_json
    from autotune.explain.screen import report_screen
    from autotune.explain.subject import is_file

    if is_file(what):
        subjects = _file_subjects(Path(what), study, machine, concurrency, database)
    else:
        # a study file is explained without the database
        from autotune.explain.stored import open_study, trial_subject
        from autotune.store.store import Store

        store = Store.existing(database_url(database))
        name, _, trial = what.rpartition(":")
        context = open_study(store, name or study)
        subjects = [trial_subject(context, context.trial(trial), concurrency)]
    try:
        found = [explain_subject(subject) for subject in subjects]
    except ValueError as error:
        raise AutotuneError(f"{what}: the model can't explain it: {error}") from None
    if as_json:
        print_json({"explanations": [to_json(one) for one in found]})
        return
    screen = report_screen()
    for index, one in enumerate(found):
        if index:
            screen.rule()
        show(one, screen)


def _file_subjects(
    path: Path,
    study: str | None,
    machine: str | None,
    concurrency: int | None,
    database: str | None,
) -> "list[Subject]":
    from autotune.explain.config_subject import (
        best_study_name,
        launch_subjects,
        study_file_subjects,
    )
    from autotune.yaml_source import read_yaml

    if not path.is_file():
        raise UserError(f"no file {path}; give a trial number, a knobs id or a YAML file")
    data = read_yaml(path).data
    if isinstance(data, dict) and "space" in data and "budget" in data:
        return study_file_subjects(path, concurrency)
    context = None
    wanted = study or best_study_name(data)
    if wanted is not None and machine is None:
        from autotune.explain.stored import open_study
        from autotune.store.store import Store

        try:
            store = Store.existing(database_url(database))
            if study is not None or store.find_study(wanted) is not None:
                context = open_study(store, wanted)
        except UserError:
            # the file stands on its own where its study's database is elsewhere
            if study is not None or database is not None:
                raise
    return launch_subjects(path, machine, concurrency, context)
