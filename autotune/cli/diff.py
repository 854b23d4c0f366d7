"""``autotune diff``: what differs between two runs, what it is worth, and the verdict."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.common import DatabaseOption, JsonOption, database_url, print_json
from autotune.errors import AutotuneError, UserError

if TYPE_CHECKING:
    from model.predictor import Predictor

_RUN_HELP = (
    "STUDY:TRIAL, a trial number or knobs id, an exported YAML, or a foreign run: SGLang or vLLM "
    "server log, /metrics text, bench_serving JSONL (FILE#LINE picks one line)."
)


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help=_RUN_HELP)],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The same.")],
    study: Annotated[
        str | None, typer.Option("--study", "-s", help="Study of bare trials; else the newest.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Load; else the one with most data.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="For foreign runs: a machine file or a shipped name.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="For foreign runs: a shape's name or a model folder.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="For foreign runs: a draft's folder; else a standard one.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell why two runs differ, or that they do not."""
    from autotune.diff.compare import compare
    from autotune.diff.render import show, to_json
    from autotune.diff.resolve import Resolver, same_file
    from autotune.explain.screen import report_screen

    if (machine is None) != (target is None):
        raise UserError("--machine and --target go together: the model needs both")
    resolver = Resolver(database_url(database), study)
    a, b = resolver.run(run_a), resolver.run(run_b)
    if a.label == b.label or same_file(run_a, run_b):
        b = replace(
            b, notes=(*b.notes, "the same run as A: every difference is noise of the method")
        )
    predictor = None if machine is None or target is None else _predictor(machine, target, draft)
    try:
        found = compare(a, b, predictor=predictor, concurrency=concurrency)
    except ValueError as error:
        raise AutotuneError(f"{run_a} and {run_b} can't be compared: {error}") from None
    if as_json:
        print_json(to_json(found))
    else:
        show(found, report_screen())


def _predictor(machine: str, target: str, draft: str | None) -> "Predictor":
    from autotune.explain.config_subject import named_machine
    from autotune.modelling import config_folder
    from autotune.schemas import ModelRef
    from model.acceptance import AcceptanceModel
    from model.calibration import default_calibration
    from model.predictor import Predictor
    from model.shapes import DraftShape, ModelShape

    host = named_machine(machine)
    try:
        is_folder = Path(target).is_dir()
        ref = ModelRef(path=Path(target)) if is_folder else ModelRef(shape=target, weights="random")
        shape = ModelShape.load(config_folder(ref))
        head = DraftShape.standard(shape) if draft is None else DraftShape.load(draft, target=shape)
    except (UserError, ValueError) as error:
        raise UserError(f"--target or --draft: {error}") from None
    return Predictor(shape, head, host, default_calibration(host), AcceptanceModel.prior())
