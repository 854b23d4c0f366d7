"""Options and output that the sub-commands share."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from autotune.store.database import DEFAULT_URL

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


def stderr() -> Console:
    """Console for progress and logs."""
    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """Console for results; wide enough for a table when nobody watches."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=180)


def print_json(values: Mapping[str, Any]) -> None:
    """One object on stdout."""
    json.dump(values, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
