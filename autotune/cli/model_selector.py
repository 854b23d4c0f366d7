"""``autotune model selector``: does the selector choose as NCCL's log says NCCL chose?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.common import JsonOption, print_json, stdout

if TYPE_CHECKING:
    from autotune.selector_check import SelectorReport

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("selector")
def selector(
    log: Annotated[
        list[Path],
        typer.Option("--log", help="A log of NCCL, or a folder of them; may be repeated."),
    ],
    nccl_version: Annotated[
        str | None, typer.Option(help="Where the log does not show it, such as 2.28.9.")
    ] = None,
    compute_capability: Annotated[
        int | None, typer.Option(help="90 = Hopper, 120 = RTX PRO 6000; found by elimination.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every logged all-reduce choice with the selector's.

    Topology, version and environment are read from the log (NCCL_DEBUG=INFO,
    NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING; rank 0 logs the choices).
    """
    from autotune.selector_check import check_selector

    report = check_selector(log, compute_capability=compute_capability, version=nccl_version)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)


def _print(report: "SelectorReport") -> None:
    console = stdout()
    for comm in report.comms:
        candidates = " or ".join(f"{cc // 10}.{cc % 10}" for cc in comm.compute_capability)
        console.print(
            f"NCCL {comm.version}, {comm.num_ranks} ranks, transport {comm.transport}, "
            f"compute capability {candidates}: {comm.equal} of {comm.lines} choices equal, "
            f"{comm.table_equal} of {comm.table_entries} table entries, "
            f"{comm.channels_logged} channels logged, {comm.channels_selector} by rule",
            soft_wrap=True,
        )
        for note in comm.notes:
            console.print(f"  note: {note}", soft_wrap=True)
    for item in report.differences:
        size = "" if item.size_bytes is None else f" {item.size_bytes} bytes"
        console.print(
            f"  {item.kind}{size}: logged {item.logged}, selector {item.selector} "
            f"({item.count} x, {item.evidence})",
            soft_wrap=True,
            markup=False,
        )
    for reason, count in report.not_compared.items():
        console.print(f"  not compared: {count} x {reason}", soft_wrap=True)
    console.print(f"{report.equal} of {report.lines} choices equal")
