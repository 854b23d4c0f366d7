"""``autotune env check``: did settings take effect, and could they matter?"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.effect.by_size import SizeEffect
    from autotune.effect.verdicts import Judgement

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_COMMAND = "autotune.command"
#: forwards that are judged with --target: a token, verifies, batches, a prefill chunk
_TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 2048)
_ACTIVATION_BYTES = 2


class _SplitCommand(TyperCommand):
    """Keeps what stands behind ``--`` apart from the logs in front of it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            index = args.index("--")
            ctx.meta[_COMMAND] = args[index + 1 :]
            args = args[:index]
        return super().parse_args(ctx, args)


@app.callback()
def _group() -> None:
    """Effective settings of workers."""


@app.command("check", cls=_SplitCommand)
def check(
    context: typer.Context,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[LOGS]... [-- CMD]...", help="NCCL log files, folders, or - for stdin."
        ),
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option("--expect", metavar="NAME=VALUE", help="A setting asked for; repeatable."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Machine file for predicted times; else a known host that fits the log."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Judge the all-reduce sizes of this model (shape's name or folder)."),
    ] = None,
    run: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Start CMD for a while and look into its workers."),
    ] = None,
    nccl_version: Annotated[
        str | None, typer.Option(help="For a command line that is not run.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Judge settings by NCCL's logs, or follow a command line: autotune env check -- CMD ARGS...

    Each is effective, inert (with the reason), not effective (where it was lost) or unknown.
    Exit code 1 when a setting that was asked for is not in force.
    """
    command: list[str] = context.meta.get(_COMMAND, [])
    expected = _expected(expect or [])
    if command and logs:
        raise UserError("give log files or a command after --, not both")
    if run is not None and not 0 < run < float("inf"):
        raise UserError(f"--run {run:g}: seconds must be above 0")
    if run is not None and not command:
        raise UserError("--run needs a command: autotune env check --run 60 -- CMD ARGS...")
    if not command and not logs:
        raise UserError("nothing to check: give NCCL log files or folders, or -- CMD ARGS...")
    judgement = _judge(logs or [], command, expected, machine, target, run, nccl_version)
    layers = None if target is None else _shape(target).layers
    if as_json:
        values = judgement.to_json()
        values["forward"] = forward_changes(judgement, layers)
        json.dump(values, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _print(judgement, layers)
    if judgement.num_not_effective:
        raise typer.Exit(1)


def _judge(
    logs: list[Path],
    command: list[str],
    expected: dict[str, str],
    machine_name: str | None,
    target: str | None,
    run: float | None,
    nccl_version: str | None,
) -> "Judgement":
    from autotune.lint.run import load_machine_named

    machine = load_machine_named(machine_name)
    sizes = _sizes(target)
    try:
        if not command:
            from autotune.effect.judge import judge_log
            from autotune.nccl_log import parse_nccl_logs

            return judge_log(parse_nccl_logs(logs), expected, machine=machine, sizes=sizes)
        from autotune.effect.launch import read_launch

        launch = read_launch(command)
        if run is None:
            from autotune.effect.judge_launch import judge_launch

            return judge_launch(
                launch, expected, machine=machine, nccl_version=nccl_version, sizes=sizes
            )
        from autotune.effect.judge_run import judge_run
        from autotune.effect.watch import watched_run

        print(f"running for {run:g} s with NCCL's log on", file=sys.stderr)
        with watched_run(command, run) as watched:
            return judge_run(watched, launch, expected, machine=machine, sizes=sizes)
    except ValueError as error:
        raise UserError(str(error)) from None


def _expected(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--expect {word!r}: write NAME=VALUE")
        if found.setdefault(name, value) != value:
            raise UserError(
                f"--expect {name} asks for {found[name]!r} and for {value!r}: choose one"
            )
    return found


def _sizes(target: str | None) -> tuple[int, ...]:
    """All-reduce bytes of 1 to 64 tokens and of a prefill chunk of a model."""
    if target is None:
        return ()
    hidden = _shape(target).hidden
    return tuple(tokens * hidden * _ACTIVATION_BYTES for tokens in _TOKENS)


def _shape(target: str) -> Any:
    from autotune.lint.run import load_target

    return load_target(target)


def forward_changes(judgement: "Judgement", layers: int | None) -> list[dict[str, Any]]:
    """What all asked settings together cost a forward, ms, by its tokens; empty without a model."""
    if layers is None or len(judgement.together) != len(_TOKENS):
        return []
    calls = 2 * layers
    return [
        {
            "tokens": tokens,
            "bytes": effect.size_bytes,
            "calls": calls,
            "outcome": effect.outcome,
            "change_ms": round(calls * (effect.present_us - effect.without_us) / 1e3, 3)
            if effect.outcome != "inert"
            else 0.0,
            "change_ms_90": _change_90(effect, calls),
        }
        for tokens, effect in zip(_TOKENS, judgement.together, strict=True)
        if effect.present_us is not None and effect.without_us is not None
    ]


def _change_90(effect: "SizeEffect", calls: int) -> list[float] | None:
    """90 % interval of the change of a forward, ms."""
    if effect.outcome == "inert":
        return [0.0, 0.0]
    if effect.ratio is None or effect.without_us is None:
        return None
    low, high = (calls * effect.without_us * (bound - 1.0) / 1e3 for bound in effect.ratio[1:])
    return [round(low, 3), round(high, 3)]


def _names(judgement: "Judgement") -> set[str]:
    return {knob.name for knob in judgement.knobs}


def _print(judgement: "Judgement", layers: int | None) -> None:
    from autotune.effect.ranges import sizes_in_words

    for comm in judgement.comms:
        print(
            f"NCCL {comm.version or '?'}, {comm.num_ranks} ranks, {comm.channels} channels, "
            f"transport {comm.transport}, times by "
            f"{comm.machine or 'no machine (effects by choice only)'} ({comm.evidence})"
        )
    for knob in judgement.knobs:
        value = knob.asked if knob.asked is not None else knob.read
        print(f"\n{knob.name}={value}: {knob.verdict.upper()}")
        print(f"  {knob.reason}")
        if knob.lost_at:
            print(f"  lost: {knob.lost_at}")
        if knob.evidence:
            print(f"  evidence: {', '.join(knob.evidence[:2])}")
    if judgement.together:
        print(f"\nall of them together: {sizes_in_words(judgement.together)}")
    for worker in judgement.workers:
        if worker.environment is not None and worker.nccl_library is not None:
            values = [f"{n}={v}" for n, v in worker.environment.items() if n in _names(judgement)]
            print(
                f"\npid {worker.pid} ({worker.name[:60]}): {' '.join(values) or 'none of them set'}"
                f", NCCL {worker.nccl_version or '?'} ({worker.nccl_library})"
            )
    for row in forward_changes(judgement, layers):
        bounds = row["change_ms_90"]
        spread = f" (90 %: {bounds[0]:+.2f} to {bounds[1]:+.2f})" if bounds and any(bounds) else ""
        print(
            f"  {row['tokens']} tokens ({row['bytes']} bytes): {row['change_ms']:+.2f} ms a "
            f"forward{spread}, {row['calls']} all-reduces"
        )
    for offer in judgement.suggestions:
        print(f"\npredicted better: {offer.text}")
    if judgement.notes:
        print()
    for note in dict.fromkeys(judgement.notes):
        print(f"note: {note}")
