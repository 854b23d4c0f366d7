"""``autotune predict``: what the model expects, without measuring anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.common import JsonOption, print_json, stdout
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.plan import Plan
    from model.spec import Knobs, Prediction, Scalar

#: knobs that are ranked; larger spaces are sampled
_RANKED = 50_000


def predict(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY|KNOB=VALUE...",
            help="A study file, knobs such as speculation.steps=3, or both.",
        ),
    ],
    target: Annotated[
        str | None, typer.Option(help="Without a study: a shape's name or a model folder.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="Without a study: a machine file, or the name of a shipped one.")
    ] = "auto",
    concurrency: Annotated[int, typer.Option(help="Without a study.")] = 1,
    input_len: Annotated[int, typer.Option(help="Without a study.")] = 1000,
    output_len: Annotated[int, typer.Option(help="Without a study.")] = 256,
    top: Annotated[int, typer.Option(help="How many knobs of a study to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Predict knobs term by term, or rank all knobs of a study.

    The constants are the priors of the machine; a study's own calibration is used by the study.
    """
    from autotune.plan import make_plan
    from autotune.study_file import load_study

    assignments = [word for word in what if "=" in word]
    files = [word for word in what if "=" not in word]
    if len(files) > 1:
        raise UserError(f"predict takes one study file, got {', '.join(files)}")
    if files:
        plan = make_plan(load_study(Path(files[0])))
    else:
        if target is None:
            raise UserError("predict needs a study file, or --target SHAPE with knobs")
        plan = _bare_plan(target, machine, concurrency, input_len, output_len)
    if assignments:
        notes = []
        tp_given = any(word.startswith("parallel.tp=") for word in assignments)
        if not files and not tp_given and plan.machine.num_gpus > 1:
            ranks = _all_gpus(plan)
            assignments.append(f"parallel.tp={ranks}")
            notes.append(
                f"parallel.tp is not given: {ranks} of this machine's {plan.machine.num_gpus} GPUs"
            )
        knobs = _knobs(plan, assignments)
        notes += [note for note in [_graph_note(plan, knobs, assignments)] if note is not None]
        _show_knobs(plan, knobs, notes, as_json)
    else:
        _show_ranking(plan, top, as_json)


def _bare_plan(
    target: str, machine: str, concurrency: int, input_len: int, output_len: int
) -> "Plan":
    """A plan for knobs that come without a study."""
    import yaml

    from autotune.plan import make_plan
    from autotune.study_file import parse_study

    is_folder = Path(target).is_dir()
    model = {"path": target} if is_folder else {"shape": target, "weights": "random"}
    draft = {"shape": Path(target).name, "weights": "random"}
    study = {
        "name": "predict",
        "machine": _machine_file(machine),
        "target": model,
        "draft": draft,
        "workload": {
            "prompts": "builtin:code",
            "input_len": input_len,
            "output_len": output_len,
            "concurrency": [concurrency],
        },
        "backend": {"kind": "sim"},
        "space": {"speculation.method": ["off", "eagle3"], "speculation.steps": [1]},
        "budget": {"measured_trials": 1},
    }
    return make_plan(parse_study(yaml.safe_dump(study), "command line", Path.cwd()))


def _all_gpus(plan: "Plan") -> int:
    """The most ranks that the machine has GPUs for and the target can be divided by."""
    gpus = plan.machine.num_gpus
    fitting = (n for n in range(gpus, 1, -1) if plan.model.target.head_problem(n) is None)
    return next(fitting, 1)


def _machine_file(name: str) -> str:
    """The file of a shipped machine's name; other words stay as they are."""
    shipped = Path(__file__).parents[2] / "studies" / "machines" / f"{name}.yaml"
    return str(shipped) if shipped.is_file() else name


def _knobs(plan: "Plan", assignments: list[str]) -> "Knobs":
    """The study's baseline with the given knobs set; a chain unless said otherwise."""
    import yaml

    from autotune.hosts import rank_problem
    from autotune.knob_values import parse_dimension
    from autotune.space import baseline_knobs, build_space
    from model.spec import Knobs

    given: dict[str, Scalar] = {}
    for word in assignments:
        name, _, text = word.partition("=")
        try:
            value = yaml.safe_load(text) if text not in ("off", "on", "yes", "no") else text
            (given[name],) = parse_dimension(name, value)
        except yaml.YAMLError:
            raise UserError(f"{name}: {text!r} is no value; write for example 4 or auto") from None
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
    if "speculation.method" not in given and any(n.startswith("speculation.") for n in given):
        given["speculation.method"] = "eagle3"
    listed = {name: (value,) for name, value in given.items()}
    problem = rank_problem(plan.study, plan.machine, plan.model.target)
    space = build_space(listed, plan.machine, problem)
    base = baseline_knobs(space, listed).values()
    knobs = space.at(0).values()
    return Knobs.of({**base, **knobs})


def _graph_note(plan: "Plan", knobs: "Knobs", assignments: list[str]) -> str | None:
    """What is assumed of CUDA graphs where nobody says anything: the engine's own default."""
    listed = (*assignments, *plan.study.space)
    if plan.machine.gpu is None or any(word.startswith("cuda_graph.") for word in listed):
        return None
    phases = ("decode",) if knobs.method == "off" else ("draft", "verify", "extend")
    settings = " ".join(f"cuda_graph.{phase}=true" for phase in phases)
    return (
        "no cuda_graph.* is set, so nothing is captured, as in the engine; SGLang and vLLM capture "
        f"by default, which is {settings}"
    )


def _show_knobs(plan: "Plan", knobs: "Knobs", notes: list[str], as_json: bool) -> None:
    from autotune.store.codec import prediction_to_json

    predictions = plan.model.predict(knobs)
    if as_json:
        print_json(
            {
                "knobs": knobs.values(),
                "notes": notes,
                "levels": [
                    {"concurrency": level, **prediction_to_json(prediction)}
                    for level, prediction in predictions.items()
                ],
            }
        )
        return
    from rich.table import Table

    screen = stdout()
    for level, prediction in predictions.items():
        screen.print(f"{knobs.label()} at concurrency {level}", soft_wrap=True)
        table = Table("term", "ms per cycle (90 %)", "speed of light, ms")
        for name, term in prediction.terms_ms.items():
            bound = prediction.speed_of_light_ms.get(name)
            shown = "–" if bound is None else f"{bound:.3f}"
            table.add_row(name, f"{term.median:.3f} ({term.low:.3f}–{term.high:.3f})", shown)
        cycle = prediction.cycle_ms
        table.add_row("cycle", f"{cycle.median:.3f} ({cycle.low:.3f}–{cycle.high:.3f})", "")
        screen.print(table)
        _print_summary(screen, prediction)
    for note in notes:
        screen.print(f"note: {note}", soft_wrap=True)


def _print_summary(screen: Any, prediction: "Prediction") -> None:
    speed, accepted = prediction.tokens_per_s, prediction.accept_length
    screen.print(
        f"{speed.median:.1f} tok/s (90 %: {speed.low:.1f}–{speed.high:.1f}), accept length "
        f"{accepted.median:.2f} ({accepted.low:.2f}–{accepted.high:.2f}), "
        f"{prediction.memory_gib_per_gpu:.2f} GiB per rank",
        soft_wrap=True,
    )
    if not prediction.feasible:
        screen.print(f"does not fit: {prediction.infeasible_reason}", soft_wrap=True)
    for item in prediction.inert:
        screen.print(f"inert: {item.knob}: {item.reason}", soft_wrap=True)


def _show_ranking(plan: "Plan", top: int, as_json: bool) -> None:
    """The best predicted knobs of a study at each level."""
    from autotune.store.codec import prediction_to_json

    pool = plan.space.sample(_RANKED, plan.study.seed)
    levels: list[dict[str, Any]] = []
    for level, workload in plan.workloads.items():
        many = plan.model.predictor.predict_many(pool, workload)
        rows = [plan.model.predictor.predict(pool[int(i)], workload) for i in many.best(top)]
        base = plan.model.predictor.predict(plan.baseline, workload)
        levels.append({"concurrency": level, "baseline": base, "best": rows})
    if as_json:
        print_json(
            {
                "study": plan.study.name,
                "num_possible": plan.space.size,
                "num_ranked": len(pool),
                "levels": [
                    {
                        "concurrency": entry["concurrency"],
                        "baseline_tokens_per_s": entry["baseline"].tokens_per_s.median,
                        "best": [
                            {"knobs": p.knobs.values(), **prediction_to_json(p)}
                            for p in entry["best"]
                        ],
                    }
                    for entry in levels
                ],
            }
        )
        return
    from rich.table import Table

    screen = stdout()
    screen.print(f"{plan.space.size} possible configurations, {len(pool)} ranked")
    for entry in levels:
        base = entry["baseline"].tokens_per_s
        table = Table(title=f"concurrency {entry['concurrency']}", title_justify="left")
        table.add_column("predicted tok/s (90 %)", justify="right")
        table.add_column("× baseline", justify="right")
        table.add_column("accept length", justify="right")
        table.add_column("knobs")
        for prediction in (entry["baseline"], *entry["best"]):
            speed = prediction.tokens_per_s
            table.add_row(
                f"{speed.median:.1f} ({speed.low:.1f}–{speed.high:.1f})",
                f"{speed.median / base.median:.2f}",
                f"{prediction.accept_length.median:.2f}",
                prediction.knobs.label(),
            )
        screen.print(table)
