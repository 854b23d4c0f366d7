"""``engine generate`` and ``engine bench``: start from a best-config YAML (or a launch config)."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from engine.api import Engine, check_requests
from engine.bench import BenchRow, bench_level, random_prompts
from engine.build import resolve
from engine.config import LaunchConfig, SpeculationConfig
from engine.config_file import load_config
from engine.errors import EngineError, invalid
from engine.results import Request

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Tensor-parallel speculative Mixture-of-Experts engine.",
    pretty_exceptions_enable=False,
)

#: prompt tokens of one repeat of ``bench``, held in memory
_MAX_PROMPT_TOKENS = 20_000_000

ConfigOption = Annotated[Path, typer.Option("--config", help="best-config or launch YAML")]
OtherMachineOption = Annotated[
    bool, typer.Option("--allow-other-machine", help="accept a file made on another machine")
]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
OffOption = Annotated[bool, typer.Option("--off", help="plain decoding, whatever the schedule")]


@app.command()
def generate(
    config: ConfigOption,
    prompt: Annotated[str | None, typer.Option(help="text (needs the target's tokenizer)")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="token ids, comma separated")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
    off: OffOption = False,
    allow_other_machine: OtherMachineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue one prompt."""
    with _exit_codes():
        launch = load_config(config, allow_other_machine=allow_other_machine)
        tokenizer = _tokenizer(launch, needed=prompt_ids is None)
        ids = _prompt_ids(prompt, prompt_ids, tokenizer)
        request = Request(
            prompt_ids=ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
        )
        speculation = SpeculationConfig() if off else launch.speculation_at(1)
        # loading a large model takes minutes: first all that is seen without it
        check_requests(launch, resolve(launch), [request], speculation)
        with Engine(launch) as engine:
            run = engine.generate([request], speculation, concurrency=1)
        result = run.requests[0]
        text = tokenizer.decode(list(result.token_ids)) if tokenizer else None
        if as_json:
            _print_json(
                {
                    "text": text,
                    "token_ids": result.token_ids,
                    "finish_reason": result.finish_reason,
                    "ttft_ms": result.ttft_s * 1e3,
                    "tokens_per_s": run.tokens_per_s,
                    "accept_length": run.counters.accept_length,
                    "phases_ms": dict(run.phases_ms),
                }
            )
            return
        print(text if text is not None else " ".join(map(str, result.token_ids)))
        rate = f"{run.tokens_per_s:.1f} tok/s" if run.tokens_per_s else "one token"
        length = run.counters.accept_length
        drafted = f", accept length {length:.2f}" if length else ", speculation off"
        print(f"{rate}, TTFT {result.ttft_s * 1e3:.0f} ms{drafted}", file=sys.stderr)


@app.command()
def bench(
    config: ConfigOption,
    concurrency: Annotated[str, typer.Option(help="comma separated")] = "1",
    input_len: Annotated[int, typer.Option(min=1)] = 64,
    output_len: Annotated[int, typer.Option(min=2)] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="per repeat")] = 8,
    repeats: Annotated[int, typer.Option(min=1, max=10_000)] = 3,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    off: OffOption = False,
    allow_other_machine: OtherMachineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure TTFT, TPOT and tokens/s by concurrency, on random token ids."""
    with _exit_codes():
        launch = load_config(config, allow_other_machine=allow_other_machine)
        levels = _levels(concurrency, launch)
        if num_prompts * input_len > _MAX_PROMPT_TOKENS:
            raise invalid(
                f"--num-prompts {num_prompts} of --input-len {input_len} are "
                f"{num_prompts * input_len:,} prompt tokens a repeat; at most "
                f"{_MAX_PROMPT_TOKENS:,} are made"
            )
        shapes = resolve(launch)
        longest = Request(
            prompt_ids=(0,) * input_len, max_new_tokens=output_len, temperature=temperature
        )
        for level in levels:
            speculation = SpeculationConfig() if off else launch.speculation_at(level)
            check_requests(launch, shapes, [longest], speculation)
        with Engine(launch) as engine:
            vocab = shapes.target.vocab
            rows = [
                bench_level(
                    engine,
                    random_prompts(max(num_prompts, level), input_len, vocab, launch.seed),
                    concurrency=level,
                    output_len=output_len,
                    repeats=repeats,
                    speculation=SpeculationConfig() if off else None,
                    temperature=temperature,
                )
                for level in levels
            ]
            notes = engine.notes
        if as_json:
            _print_json({"levels": [row.as_json() for row in rows], "notes": notes})
        else:
            Console().print(_table(rows))
            for note in notes:
                print(f"note: {note}", file=sys.stderr)


def main() -> None:
    """Console script."""
    app()


@contextmanager
def _exit_codes() -> Iterator[None]:
    """2 for a user's mistake, 1 for a failure; one line on stderr, then the worker's log."""
    try:
        yield
    except EngineError as error:
        print(f"engine: {error.message}", file=sys.stderr)
        if error.kind != "invalid" and error.log_tail.strip():
            print(f"--- worker log (tail) ---\n{error.log_tail.rstrip()}", file=sys.stderr)
        raise typer.Exit(2 if error.kind == "invalid" else 1) from None


def _tokenizer(config: LaunchConfig, *, needed: bool) -> Any:
    path = None if config.target.path is None else Path(config.target.path) / "tokenizer.json"
    if path is None or not path.is_file():
        if needed:
            place = "a shape has none" if path is None else f"{path} is not there"
            raise invalid(f"--prompt needs a tokenizer, but {place}; use --prompt-ids")
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception, nothing finer
        if not needed:
            return None
        raise invalid(f"{path}: no tokenizer: {' '.join(str(error).split())}") from None


def _prompt_ids(prompt: str | None, prompt_ids: str | None, tokenizer: Any) -> tuple[int, ...]:
    if (prompt is None) == (prompt_ids is None):
        raise invalid("give either --prompt or --prompt-ids")
    if prompt is not None:
        return tuple(tokenizer.encode(prompt).ids)
    assert prompt_ids is not None
    return _integers("--prompt-ids", prompt_ids)


def _levels(text: str, config: LaunchConfig) -> tuple[int, ...]:
    levels = _integers("--concurrency", text)
    wrong = next((n for n in levels if not 1 <= n <= config.max_concurrency), None)
    if wrong is not None:
        raise invalid(
            f"--concurrency {wrong} must be between 1 and max_concurrency {config.max_concurrency}"
        )
    return levels


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise invalid(f"{option} {text!r} must be integers separated by commas") from None


def _print_json(value: dict[str, object]) -> None:
    print(json.dumps(value))


def _table(rows: list[BenchRow]) -> Table:
    table = Table(
        title="random prompts; medians, tok/s with its lowest and highest repeat",
        box=None,
        padding=(0, 1),
    )
    heads = ("conc.", "speculation", "n", "TTFT ms", "TPOT ms", "tok/s", "low-high")
    for head in (*heads, "accept", "cycle ms"):
        table.add_column(head, justify="right")
    for row in rows:
        spec = row.speculation
        name = "off" if spec.method == "off" else f"{spec.steps}/{spec.topk}/{spec.num_tokens}"
        table.add_row(
            str(row.concurrency),
            name,
            str(row.repeats),
            f"{row.ttft_ms:.1f}",
            "-" if row.tpot_ms is None else f"{row.tpot_ms:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_s_low:.1f}-{row.tokens_per_s_high:.1f}",
            "-" if row.accept_length is None else f"{row.accept_length:.2f}",
            f"{row.cycle_ms:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
