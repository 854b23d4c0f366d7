"""``autotune model break-even``: what speculation needs, given times measured on the host."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.common import JsonOption, print_json, stderr, stdout
from autotune.errors import UserError

if TYPE_CHECKING:
    from model.measured_cycle import ChainNeeds
    from model.spec import Workload

#: depths shown beside the measured one
_DEPTHS = range(1, 7)
#: how well a measured accept length is believed to hold for other prompts of its kind
_ACCEPT_REL_SD = 0.05


def break_even(
    target: Annotated[str, typer.Option(help="Shape's name in studies/shapes, or a model folder.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="A machine file, or the name of a shipped one.")
    ],
    baseline: Annotated[
        float,
        typer.Option("--baseline-tokens-per-s", help="Measured, speculation off, all requests."),
    ],
    verify: Annotated[
        list[float], typer.Option("--verify-ms", help="Measured verify of one cycle; repeatable.")
    ],
    steps: Annotated[int, typer.Option(help="Draft steps of that run (a chain).", min=1)] = 2,
    speed: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-s", help="Measured with speculation: tells the accept length then."
        ),
    ] = None,
    accept_length: Annotated[
        float | None,
        typer.Option(help="Measured at these steps, bonus token included; else the prior's."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks.", min=1)] = 8,
    concurrency: Annotated[int, typer.Option(min=1)] = 1,
    context: Annotated[int, typer.Option(help="Tokens, mean over the answer.", min=1)] = 1000,
    as_json: JsonOption = False,
) -> None:
    """What speculation needs to beat a measured baseline, given a measured verify.

    The verify of other depths is the measured one and the predicted difference; draft, extend,
    sampling and host gaps are predicted, with CUDA graphs.
    """
    from model.measured_cycle import chain_needs, doubts
    from model.spec import Knobs

    predictor = _predictor(target, machine, steps, accept_length)
    workload = _workload(concurrency, context)
    chain = Knobs.of(
        {
            "speculation.method": "eagle3",
            "speculation.steps": steps,
            "speculation.topk": 1,
            "speculation.draft_tokens": steps + 1,
            "parallel.tp": tp,
            **{f"cuda_graph.{phase}": True for phase in ("decode", "draft", "verify", "extend")},
        }
    )
    if not 0 < baseline < float("inf"):
        raise UserError(f"--baseline-tokens-per-s {baseline}: it must be positive and finite")
    plain_ms = 1e3 * concurrency / baseline
    depths = sorted({*_DEPTHS, steps})
    try:
        answers = {
            value: chain_needs(
                predictor, chain, workload, plain_step_ms=plain_ms, verify_ms=value, steps=depths
            )
            for value in verify
        }
        doubtful = doubts(predictor, chain, workload, plain_step_ms=plain_ms, verify_ms=verify)
    except ValueError as error:
        raise UserError(str(error)) from None
    for doubt in doubtful:
        stderr().print(f"warning: {doubt}", soft_wrap=True, markup=False)
    implied = {value: _implied(rows, steps, speed, concurrency) for value, rows in answers.items()}
    if as_json:
        print_json(
            {
                "target": target,
                "machine": predictor.machine.name,
                "concurrency": concurrency,
                "context": context,
                "plain_step_ms": plain_ms,
                "measured_steps": steps,
                "doubts": doubtful,
                "verify": [
                    {
                        "verify_ms": value,
                        "implied_accept_length": implied[value],
                        "chains": [asdict(row) for row in rows],
                    }
                    for value, rows in answers.items()
                ],
            }
        )
        return
    screen = stdout()
    screen.print(
        f"{target} on {predictor.machine.name}, concurrency {concurrency}, context {context}: "
        f"{baseline:g} tok/s without speculation is {plain_ms:.1f} ms a step",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    for value, rows in answers.items():
        _show(screen, value, rows, steps, implied[value], speed)


def _predictor(target: str, machine: str, steps: int, accept_length: float | None) -> Any:
    from autotune.explain.config_subject import named_machine
    from autotune.lint.run import load_target
    from model.acceptance import AcceptanceModel
    from model.calibration import default_calibration
    from model.observations import AcceptLength
    from model.predictor import Predictor
    from model.shapes import DraftShape

    host, shape = named_machine(machine), load_target(target)
    if shape is None:
        raise UserError(f"--target {target}: no such shape")
    acceptance = AcceptanceModel.prior()
    if accept_length is not None:
        try:
            seen = AcceptLength(
                steps=steps, topk=1, draft_tokens=steps + 1,
                accept_length=accept_length, rel_sd=_ACCEPT_REL_SD,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from None
        acceptance = acceptance.update([seen])
    return Predictor(shape, DraftShape.standard(shape), host, default_calibration(host), acceptance)


def _workload(concurrency: int, context: int) -> "Workload":
    from model.spec import Workload

    return Workload(
        prompts="none", prompts_sha256="", chat_template=None, input_len=context, output_len=2,
        context=context, temperature=0.0, ignore_eos=True, seed=0, concurrency=concurrency,
    )  # fmt: skip


def _implied(
    rows: "tuple[ChainNeeds, ...]", steps: int, speed: float | None, concurrency: int
) -> float | None:
    """Accept length behind a measured speed, at the cycle of the measured steps."""
    if speed is None:
        return None
    (row,) = (row for row in rows if row.steps == steps)
    return speed * row.cycle_ms.median / 1e3 / concurrency


def _show(
    screen: Any,
    verify_ms: float,
    rows: "tuple[ChainNeeds, ...]",
    steps: int,
    implied: float | None,
    speed: float | None,
) -> None:
    from rich.table import Table

    (own,) = (row for row in rows if row.steps == steps)
    need, rest = own.needed, own.rest_ms
    screen.print(
        f"\nverify of {steps + 1} tokens {verify_ms:g} ms, rest of the cycle {rest.median:.1f} ms "
        f"({rest.low:.1f}–{rest.high:.1f}): break-even accept length {need.median:.2f} "
        f"({need.low:.2f}–{need.high:.2f}), {steps} steps give {own.most} at most",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    if implied is not None:
        screen.print(
            f"{speed:g} tok/s at this cycle is an accept length of {implied:.2f}"
            + ("" if 1 <= implied <= own.most else ": impossible, so one of the figures is wrong"),
            soft_wrap=True, markup=False,
        )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for head in (
        "steps", "verify, ms", "cycle, ms\n(90 %)", "accept length\nneeded (90 %)",
        "expected\n(90 %)", "tok/s\n(90 %)", "P(pays)\n%",
    ):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.steps}{' *' if row.steps == steps else ''}",
            f"{row.verify_ms:.1f}",
            *(_text(v, 1) if i in (0, 3) else _text(v, 2) for i, v in enumerate(
                (row.cycle_ms, row.needed, row.accept_length, row.tokens_per_s)
            )),
            f"{100 * row.p_pays:.0f}",
        )  # fmt: skip
    screen.print(table)
    if all(row.needed.median > row.most for row in rows):
        screen.print("No chain pays: each needs more tokens than it can accept.")
    else:
        screen.print("* measured; the verify of the others is moved by the predicted difference")


def _text(value: Any, digits: int) -> str:
    return f"{value.median:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"
