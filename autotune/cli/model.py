"""``autotune model``: the performance model against data of one's own, and its constants."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.common import DatabaseOption, JsonOption, database_url, print_json, stdout
from autotune.cli.model_breakeven import break_even
from autotune.cli.model_selector import selector
from autotune.digits import extent, significant
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.model_validation.constants import Shown
    from autotune.model_validation.validate import Validation
    from model.machine import Machine

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.command("selector")(selector)
app.command("break-even")(break_even)


@app.command()
def validate(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="The file to predict.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="A machine file, or the name of a shipped one.")
    ],
    fit: Annotated[
        list[Path] | None,
        typer.Option("--fit", help="A file to fit the constants on; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict measured rows with constants fitted on other files only.

    Files: all-reduce JSONL with env, all-reduce CSV, step JSONL, MoE layer CSV, acceptance CSV;
    the kind is found by content. Without --fit the priors of the machine file predict.
    """
    from autotune.model_validation.validate import validate as run

    report = run(data, fit or [], _machine(machine))
    if as_json:
        print_json(report.to_dict())
    else:
        _print_validation(report)


@app.command()
def show(
    study: Annotated[
        str | None, typer.Option("--study", "-s", help="A study; the newest without any option.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", "-m", help="A machine file or shipped name: its priors."),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every constant: value, unit, prior, posterior, source, and whether data tell it."""
    from autotune.model_validation.constants import machine_constants, study_constants
    from autotune.store.store import Store

    if study is not None and machine is not None:
        raise UserError("give --study or --machine, not both")
    if machine is not None:
        shown = machine_constants(_machine(machine))
    else:
        shown = study_constants(Store.existing(database_url(database)), study)
    if as_json:
        print_json(shown.to_dict())
    else:
        _print_constants(shown)


@app.command("import-nvidia-tables")
def import_nvidia_tables(
    system: Annotated[
        str,
        typer.Option("--gpu", help="System of the tables, such as l40s; a wrong one lists all."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV to write.")],
    root: Annotated[
        Path | None, typer.Option(help="Folder of aiconfigurator_core, if not installed here.")
    ] = None,
) -> None:
    """Write the all-reduce rows of NVIDIA's measured tables as a CSV for `validate --fit`.

    Reads an installed aiconfigurator-core (pip install 'autotune-moe[nvidia-tables]').
    """
    from autotune.model_validation.nvidia import write_nvidia_tables

    count = write_nvidia_tables(system, output, root)
    stdout().print(f"{count} all-reduce rows of {system} written to {output}", soft_wrap=True)


def _machine(name: str) -> "Machine":
    from model.machine import load_machine

    shipped = Path(__file__).parents[2] / "studies" / "machines"
    path = shipped / f"{name}.yaml"
    try:
        return load_machine(path if path.is_file() else name)
    except ValueError as error:
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.yaml")))
        raise UserError(f"{error}; shipped machines: {known}") from None


def _print_validation(report: "Validation") -> None:
    from rich.table import Table

    values = report.to_dict()
    screen = stdout()
    source = ", ".join(values["fit"]) or "nothing: priors"
    screen.print(
        f"{report.data}: {values['kind']}, predicted on {report.machine}, fitted on {source}",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    table = Table()
    table.add_column("rows of")
    for name in ("rows", "MAPE", "median error", "largest", "in 90 %", "width of 90 %"):
        table.add_column(name, justify="right")
    for row in ({"name": "headline", **values}, *values["groups"]):
        table.add_row(
            str(row["name"]), str(row["rows"]), f"{row['mape']:.1%}", f"{row['median_ape']:.1%}",
            f"{row['max_ape']:.1%}", f"{row['coverage90']:.0%}", f"{row['median_width90']:.0%}",
        )  # fmt: skip
    screen.print(table)
    for row in values["worst"]:
        screen.print(
            f"worst: {row['row']}: {significant(row['predicted'], 4)} {values['unit']} predicted "
            f"({extent(row['low'], row['high'], 4)}), {significant(row['measured'], 4)} measured, "
            f"{row['error']:+.1%}",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    for reason, count in values["skipped"].items():
        screen.print(f"left out: {count} rows: {reason}", soft_wrap=True, markup=False)
    for note in values["notes"]:
        screen.print(f"note: {note}", soft_wrap=True, markup=False)


def _print_constants(shown: "Shown") -> None:
    from rich.table import Table

    screen = stdout()
    calibration = shown.calibration
    screen.print(
        f"{shown.origin}: calibration {calibration.id}, {len(calibration.used)} measurements",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    table = Table()
    for name in ("constant", "value", "90 %", "prior", "prior 90 %", "unit", "told by data"):
        numeric = name in ("value", "prior")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    table.add_column("source", overflow="fold")
    for row in shown.rows():
        low, high = row["posterior90"]
        prior_low, prior_high = row["prior90"]
        table.add_row(
            row["name"], significant(row["value"], 4), extent(low, high),
            significant(row["prior"], 4), extent(prior_low, prior_high), row["unit"],
            f"{row['identifiability']:.0%} {row['told_by_data']}", row["source"],
        )  # fmt: skip
    screen.print(table)
