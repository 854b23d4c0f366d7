"""``autotune compare``: two configurations measured in turns, and what that shows."""

from typing import Annotated

import typer

from autotune.cli.common import (
    DatabaseOption,
    JsonOption,
    database_url,
    print_json,
    stderr,
    stdout,
)
from autotune.errors import AutotuneError, UserError

_WHAT = "Trial number, knobs id, `baseline`, `best`, or a best-config, launch or study YAML."
#: pairs at most: enough for 1 % at a spread of 1.5 %, or what restarts for every visit allow
_MAX_PAIRS, _MAX_PAIRS_APART = 30, 12
_INTERRUPTED = 130


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help=_WHAT)],
    second: Annotated[str, typer.Argument(metavar="B", help="The same, to compare A with.")],
    study: Annotated[
        str | None,
        typer.Option(
            "--study", "-s", help="Study whose backend measures; else the file's, newest."
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="One level only.")
    ] = None,
    max_pairs: Annotated[
        int | None,
        typer.Option(
            help=f"Pairs at most; {_MAX_PAIRS}, or {_MAX_PAIRS_APART} when every visit restarts."
        ),
    ] = None,
    wall_time: Annotated[str | None, typer.Option(help="Longest time, for example 20m.")] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Difference in percent that counts as none; else the noise floor."),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure A and B in turns until it is clear which is faster, or the budget is used up."""
    from autotune.compare_report import compared_mapping, show_compared
    from autotune.compare_session import CompareAsked, run_compare
    from autotune.measuring import StopRequestedError
    from autotune.schemas import parse_duration_s
    from autotune.stopping import StopFlag
    from autotune.store.store import Store

    if max_pairs is not None and max_pairs < 6:
        raise UserError(f"--max-pairs {max_pairs}: no test at 5 % can decide with fewer than 6")
    if margin is not None and not 0 < margin < 50:
        raise UserError(f"--margin {margin} is a percentage between 0 and 50")
    try:
        wall_s = None if wall_time is None else parse_duration_s(wall_time)
    except ValueError as error:
        raise UserError(f"--wall-time: {error}") from None
    asked = CompareAsked(
        whats=(first, second),
        study=study,
        concurrency=concurrency,
        max_pairs=max_pairs,
        default_pairs=(_MAX_PAIRS, _MAX_PAIRS_APART),
        wall_time_s=wall_s,
        margin=None if margin is None else margin / 100,
    )
    flag, console = StopFlag(), stderr()

    def note(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    store = Store.existing(database_url(database))
    try:
        with flag.on_signals(note):
            found = run_compare(store, asked, flag, note)
    except StopRequestedError as stop:
        note(f"{stop} while waiting for the machine; nothing was measured")
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        print_json(compared_mapping(found))
    else:
        show_compared(found, stdout())
    if found.failure is not None:
        said = (
            f"{found.failed_arm} gave no number: {found.failure.kind} at {found.failure.stage}: "
            f"{found.failure.message}"
        )
        if as_json:
            # the answer on stdout holds it already
            note(f"autotune: {said}")
            raise typer.Exit(1)
        raise AutotuneError(said)
    if flag.reason is not None:
        raise typer.Exit(_INTERRUPTED)
