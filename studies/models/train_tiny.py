"""Trains studies/models/tiny-moe and its EAGLE-3 head; writes both folders and the model card.

    PYTHONPATH=. python studies/models/train_tiny.py --seconds-target 230 --seconds-head 120

Stages: corpus and tokenizer, target, the target's own continuations, head, measurement. Every
stage has a wall-clock budget; what is there so far is saved as it goes, and packed with --pack.
``--smoke`` trains a much smaller pair for seconds on a CPU, to test the script.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from tiny_card import environment, write_card
from tiny_corpus import encode, read_corpus, saved_tokenizer, train_tokenizer
from tiny_eagle import aux_layers
from tiny_export import check_target, eager_copy, save_target
from tiny_head_stages import continuations, measure, train_head
from tiny_moe import TinyMoe
from tiny_run import HEAD_FOLDER, RESULTS, SMOKE, TARGET_FOLDER, Data, Run, Sizes, optimise


def prepare(run: Run) -> Data:
    """Corpus, tokenizer, token streams."""
    corpus = read_corpus(run.args.stdlib, run.sizes.max_files)
    run.log(f"corpus: {len(corpus.code)} modules, {corpus.num_chars} characters")
    folder = run.args.models / TARGET_FOLDER
    if run.args.keep_target:
        tokenizer = saved_tokenizer(folder)
    else:
        tokenizer = train_tokenizer(corpus, run.sizes.config.vocab_size, folder)
    streams = [
        torch.from_numpy(encode(tokenizer, d, run.args.seed)) for d in (corpus.code, corpus.text)
    ]
    run.log(f"tokens: code {len(streams[0])}, text {len(streams[1])}")
    run.results["corpus"] = {
        "modules": len(corpus.code),
        "characters": corpus.num_chars,
        "dropped_paragraphs": corpus.num_dropped_paragraphs,
        "tokens_code": len(streams[0]),
        "tokens_text": len(streams[1]),
    }
    split = [int(len(s) * 0.985) for s in streams]
    length = run.sizes.sequences[0]
    tails = torch.cat([s[n:] for s, n in zip(streams, split, strict=True)])
    rows = min(128, len(tails) // length)
    valid = tails[: len(tails) // length * length].view(-1, length)
    valid = valid[torch.linspace(0, len(valid) - 1, rows).long()]
    code, text = (s[:n].to(run.device) for s, n in zip(streams, split, strict=True))
    return Data(code=code, text=text, valid=valid.long().to(run.device))


def token_loss(target: TinyMoe, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token cross entropy (nats) and the load-balancing loss."""
    states, _, balance = target(ids_BS[:, :-1])
    logits = target.head(states).float()
    return F.cross_entropy(logits.flatten(0, 1), ids_BS[:, 1:].flatten()), balance


def train_target(run: Run, data: Data, until_of: Callable[[], float]) -> TinyMoe:
    """Train the target; keeps the weights of the best validation loss."""
    sizes, c = run.sizes, run.sizes.config
    target = TinyMoe(c).to(run.device)
    best: dict[str, object] = {"loss": math.inf}
    curve: list[tuple[float, float]] = []

    def batch(length: int) -> torch.Tensor:
        return data.windows(sizes.batch_tokens // length, length + 1, sizes.text_share)

    def loss_of(progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        loss, balance = token_loss(target, batch(sizes.sequences[int(progress > 0.85)]))
        return loss + 0.01 * balance, torch.stack([loss, balance]).detach()

    if run.args.compile:
        compile_layers(run, target, [batch(length) for length in sizes.sequences])

    def report(progress: float, detail: torch.Tensor) -> str:
        target.eval()
        with torch.no_grad(), run.autocast():
            loss = float(token_loss(target, data.valid)[0])
        target.train()
        curve.append((round(progress, 3), round(loss, 4)))
        if loss < best["loss"]:  # type: ignore[operator]
            best.update(loss=loss, state={k: v.clone() for k, v in target.state_dict().items()})
            save_target(target, run.args.models / TARGET_FOLDER)
        return f"loss {detail[0]:.3f} balance {detail[1]:.3f} valid {loss:.3f}"

    until = until_of()
    every = max(2.0, (until - run.seconds) / 14)
    steps = optimise(run, target, sizes.target_rate, 0.1, until, loss_of, report, every)
    run.log(f"target done: {steps} steps, {report(1.0, torch.zeros(2))}")
    target.load_state_dict(best["state"])  # type: ignore[arg-type]
    run.results["target"] = {
        "steps": steps,
        "tokens_seen": steps * sizes.batch_tokens,
        "valid_loss_nats": best["loss"],
        "valid_curve": curve,
    }
    return target


def load_target(run: Run) -> TinyMoe:
    """The target of an earlier run, whose results stand beside its folder."""
    from safetensors.torch import load_file

    target = TinyMoe(run.sizes.config).to(run.device)
    target.load_hf_state(load_file(str(run.args.models / TARGET_FOLDER / "model.safetensors")))
    earlier = json.loads((run.args.models / RESULTS).read_text())
    run.results["target"] = earlier["target"]
    run.results["target_command"] = earlier.get("target_command", earlier["environment"]["command"])
    run.log(f"target loaded from {run.args.models / TARGET_FOLDER}")
    return target


def compile_layers(run: Run, target: TinyMoe, batches: list[torch.Tensor]) -> None:
    """Compile the layer once for every sequence length; stays eager when that fails."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    try:
        for layer in target.layers:
            layer.compile(dynamic=False)
        for ids in batches:
            with run.autocast():
                token_loss(target, ids)[0].backward()
            run.log(f"compiled for {ids.shape[1] - 1} tokens")
    except Exception as error:  # noqa: BLE001 -- any failure of the compiler means: go without
        run.log(f"not compiled: {type(error).__name__}: {str(error)[:200]}")
        for layer in target.layers:
            layer._compiled_call_impl = None
    target.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, default=Path(__file__).parent, help="where the folders go"
    )
    parser.add_argument(
        "--stdlib",
        type=Path,
        action="append",
        default=[],
        help="a Lib folder to train on; repeatable; default: this Python's",
    )
    parser.add_argument("--note", default="", help="what --stdlib is, for the model card")
    parser.add_argument("--pack", type=Path, help="also write tar.gz files here")
    parser.add_argument(
        "--keep-target", action="store_true", help="train only the head, for the target in --models"
    )
    parser.add_argument(
        "--keep-head", action="store_true", help="train on from the head in --models"
    )
    parser.add_argument("--seconds-target", type=float, default=230)
    parser.add_argument("--seconds-head", type=float, default=120)
    parser.add_argument("--seconds-total", type=float, default=560, help="everything ends by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    run = Run(args, SMOKE if args.smoke else Sizes())
    torch.manual_seed(args.seed)
    # kept for measuring and exporting: seconds
    reserve = 45.0
    run.results["environment"], run.results["note"] = environment(args), args.note
    run.log(f"{run.results['environment']}")
    data = prepare(run)
    generating = args.seconds_total * (0.25 if args.keep_target else 0.06)
    if args.keep_target:
        target = load_target(run)
    else:
        target = train_target(
            run,
            data,
            lambda: min(
                run.seconds + args.seconds_target,
                args.seconds_total - reserve - generating - args.seconds_head,
            ),
        )
    target = eager_copy(target)
    run.results["target_check"] = check_target(target, args.models / TARGET_FOLDER)
    run.log(f"target checked against transformers: {run.results['target_check']}")
    run.pack(TARGET_FOLDER)
    own = continuations(run, data, target, run.seconds + generating)
    until = min(run.seconds + args.seconds_head, args.seconds_total - reserve)
    head = train_head(run, data, target, own, until)
    run.pack(HEAD_FOLDER)
    measure(run, target, head)
    sizes = {
        folder: (args.models / folder / "model.safetensors").stat().st_size
        for folder in (TARGET_FOLDER, HEAD_FOLDER)
    }
    run.results["bytes"], run.results["aux_layers"] = sizes, aux_layers(run.sizes.config)
    run.log(f"sizes {sizes}, together {sum(sizes.values()) / 2**20:.2f} MiB")
    run.results["seconds"] = round(run.seconds, 1)
    run.pack(HEAD_FOLDER)
    write_card(args.models / TARGET_FOLDER / "README.md", run.results, run.sizes)
    run.pack(TARGET_FOLDER)
    run.log("done")


if __name__ == "__main__":
    main()
