"""Options and output that the sub-commands share."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.errors import UserError
from autotune.screen import TABLE_WIDTH, console
from autotune.store.location import DEFAULT_URL

if TYPE_CHECKING:
    from rich.console import Console

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        "-d",
        help=f"SQLAlchemy URL or SQLite file; else $AUTOTUNE_DATABASE, else {DEFAULT_URL}.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]


def database_url(option: str | None, from_study: str | None = None) -> str:
    """The database to use: option, study file, environment, default, in this order."""
    return option or from_study or os.environ.get("AUTOTUNE_DATABASE") or DEFAULT_URL


def check_output(path: Path, option: str = "--out") -> None:
    """Refuse a file that can't be written before hours of measuring, not after. ``UserError``."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UserError(f"{option} {path}: there is no folder {folder}; make it or name another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{option} {path}: can't be written; name another file with {option}")


def stderr() -> "Console":
    """Console for progress and logs."""
    return console(stderr=True)


def stdout(width: int = TABLE_WIDTH) -> "Console":
    """Console for results; ``width`` columns when nobody watches."""
    return console(width=width)


def print_json(values: Mapping[str, Any]) -> None:
    """One object on stdout."""
    json.dump(values, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
