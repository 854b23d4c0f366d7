"""``autotune lint``: what is wrong with a command line, environment or log, without a GPU."""

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.screen import PROSE_WIDTH

if TYPE_CHECKING:
    from autotune.lint.findings import Finding


def lint(
    engine: Annotated[str, typer.Option(help="sglang, vllm or engine.")],
    version: Annotated[
        str | None, typer.Option(help="Server version such as 0.5.9; else from the log.")
    ] = None,
    args: Annotated[
        str, typer.Option(help="The command line, or its options, as one quoted word.")
    ] = "",
    env: Annotated[str, typer.Option(help='"NAME=VALUE NAME=VALUE", also export lines.')] = "",
    machine: Annotated[
        str | None, typer.Option(help="Machine file, or its name in studies/machines.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Shape's name in studies/shapes, or a model folder.")
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(help="Server, benchmark, nvidia-smi or NCCL log; repeatable."),
    ] = None,
    nccl_version: Annotated[
        str | None, typer.Option(help="NCCL version; else by the server's pin, else the machine's.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; else the server's limit.")
    ] = None,
    accept_length: Annotated[
        float | None, typer.Option(min=1.0, help="Measured, bonus token included; else the log's.")
    ] = None,
    baseline_tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Speed without speculation, all requests.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Report contradictions, inert and unsafe settings, and speculation that cannot pay.

    Exit code 1 when an error is found.
    """
    from autotune.lint.findings import SEVERITIES
    from autotune.lint.run import Request
    from autotune.lint.run import lint as run

    findings = run(
        Request(
            engine=engine,
            version=version,
            args=args,
            env=env,
            machine=machine,
            target=target,
            logs=tuple(log or ()),
            nccl_version=nccl_version,
            concurrency=concurrency,
            accept_length=accept_length,
            baseline_tokens_per_s=baseline_tokens_per_s,
        )
    )
    counts = {name: sum(f.severity == name for f in findings) for name in SEVERITIES}
    if as_json:
        json.dump(
            {"engine": engine, "findings": [f.to_json() for f in findings], "counts": counts},
            sys.stdout,
            indent=2,
        )
        sys.stdout.write("\n")
    else:
        for finding in findings:
            _print(finding)
        shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        print(shown or "nothing found")
    if counts["error"]:
        raise typer.Exit(1)


def _print(finding: "Finding") -> None:
    lines = {"": finding.reason, "fix: ": finding.fix, "source: ": finding.source}
    print(f"{finding.severity.upper()} [{finding.id}] {finding.subject}")
    for name, text in lines.items():
        if text:
            print(
                textwrap.fill(
                    name + text, PROSE_WIDTH, initial_indent="  ",
                    subsequent_indent="  " + " " * len(name),
                    break_long_words=False, break_on_hyphens=False,
                )
            )  # fmt: skip
