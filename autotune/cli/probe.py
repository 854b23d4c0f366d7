"""``autotune probe``: measure this host and write its machine file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autotune.cli.common import JsonOption, print_json, stderr, stdout
from autotune.digits import extent, significant
from autotune.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from autotune.probe.spread import Sample
    from autotune.probe.timings import Timings
    from model.machine import Machine


def probe(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Machine file (YAML) to write.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="What the ranks run on.")
    ] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Memory and launches only, in seconds.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the machine in the file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure memory bandwidth, launch overhead, copies and all-reduce by size on this host.

    A study names the file as ``machine: FILE``. Stop other work first: what runs beside the probe
    is measured with it.
    """
    if output is not None:
        _check_writable(output, force)
    # here, because it brings the whole performance model
    from autotune.probe.run import choose_device, probe_machine
    from autotune.probe.timings import num_parts

    chosen, num_gpus = choose_device(device)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.5 * cores:
        stderr().print(
            f"load average {load:.1f} on {cores} CPUs: other work slows down what is measured now"
        )
    with _progress() as bar:
        task = bar.add_task("probe", total=num_parts(chosen, num_gpus, quick=quick))
        started = False

        def report(part: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=part)
            started = True

        machine, timings = probe_machine(chosen, num_gpus, report, quick=quick, name=name)
        bar.update(task, advance=1, description="done")
    for part, why in timings.skipped.items():
        stderr().print(f"{part}: no number: {why}")
    if output is not None:
        _write(output, machine)
    if as_json:
        print_json(
            {
                "machine": machine.to_dict(),
                "fingerprint": machine.fingerprint,
                "host_fingerprint": machine.host_fingerprint,
                "file": None if output is None else str(output),
                "skipped": timings.skipped,
            }
        )
    else:
        _print(machine, timings, output)


def _progress() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
    )


def _check_writable(output: Path, force: bool) -> None:
    """Refuse before a minute of measuring, not after it."""
    if output.is_dir():
        raise UserError(f"-o {output}: is a folder; name a file such as {output / 'machine.yaml'}")
    if output.exists() and not force:
        raise UserError(f"-o {output}: exists already; name another file or add --force")
    folder = output.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"-o {output}: {folder} is no folder that can be written to")


def _write(output: Path, machine: "Machine") -> None:
    import yaml

    values: dict[str, Any] = machine.to_dict()
    text = (
        f"# Written by autotune probe on host {machine.host_fingerprint}. Rates: GB/s = 10^9 B/s.\n"
    )
    text += yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"-o {output}: {error.strerror}") from None


def _print(machine: "Machine", timings: "Timings", output: Path | None) -> None:
    from rich.table import Table

    from autotune.probe.spread import Sample

    console = stdout()
    table = Table(box=None, pad_edge=False, title=machine.name, title_justify="left")
    for head in ("what", "unit", "median", "90 % within", "n", "shape"):
        table.add_column(
            head, justify="right" if head in ("median", "90 % within", "n") else "left"
        )

    def row(what: str, unit: str, sample: "Sample | None") -> None:
        if sample is None:
            return
        shape = "one mode" if sample.modes is None else sample.modes.text()
        interval = extent(sample.p05, sample.p95)
        table.add_row(what, unit, significant(sample.median), interval, str(sample.n), shape)

    row("host memory, all cores reading", "GB/s", timings.host_read)
    for index, gpu in enumerate(timings.gpus):
        row(f"GPU {index} memory read", "GB/s", Sample.of(gpu["dram"]))
        row(f"GPU {index} from host", "GB/s", Sample.of(gpu["to_gpu"]))
        row(f"GPU {index} to host", "GB/s", Sample.of(gpu["to_host"]))
        row(f"GPU {index} bf16 matmul", "TFLOP/s", Sample.of(gpu["bf16_tflops"]))
    row("launch, one by one", "us per op", timings.launch_eager)
    row("launch, CUDA graph", "us per op", timings.launch_graph)
    for item in timings.allreduce:
        what = f"all-reduce {item.backend} x {item.num_ranks}, {_size(item.size_bytes)}"
        row(what, "us", item.time)
    console.print(table)
    console.print(
        f"\nfingerprint of this host {machine.host_fingerprint}, "
        f"of its description {machine.fingerprint}"
    )
    if output is not None:
        console.print(f"wrote {output}; use it in a study: machine: {output}")


def _size(size_bytes: int) -> str:
    kib = size_bytes / 1024
    return f"{kib / 1024:g} MiB" if kib >= 1024 else f"{kib:g} KiB"
