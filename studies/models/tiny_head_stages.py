"""The later stages of a run: the target's own continuations, its head, and the measurement."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tiny_eagle import EagleHead, distillation_loss, load_head, save_head
from tiny_export import eager_copy
from tiny_measure import ChainCounts, chain_counts, distinct_share, generate, naive_chain_counts
from tiny_moe import TinyMoe
from tiny_run import HEAD_FOLDER, TARGET_FOLDER, Data, Run, optimise

from autotune.prompts import load_prompts, load_tokenizer


def continuations(run: Run, data: Data, target: TinyMoe, until: float) -> list[torch.Tensor]:
    """The target's own continuations of training windows, half code and half text."""
    sets, seed = [], 0
    for prompt_len, num_new, batch, batches, temperature in run.sizes.continuations:
        made = []
        for _ in range(batches):
            if run.seconds > until and sets:
                break
            seed += 1
            prompts = data.windows(batch, prompt_len, 0.5)
            with run.autocast():
                made.append(generate(target, prompts, num_new, temperature, seed).to(torch.int16))
        if made:
            sets.append(torch.cat(made))
            run.log(f"generated {tuple(sets[-1].shape)} at temperature {temperature}")
    return sets


def train_head(
    run: Run, data: Data, target: TinyMoe, own: list[torch.Tensor], until: float
) -> EagleHead:
    """Distil the target into the head, on its own continuations and on corpus windows."""
    sizes = run.sizes
    counts = sum(torch.bincount(s.flatten().long(), minlength=sizes.config.vocab_size) for s in own)
    if run.args.keep_head:
        head = load_head(sizes.config, run.args.models / HEAD_FOLDER).to(run.device)
        keep = head.keep_V
    else:
        keep = counts.argsort(descending=True)[: sizes.draft_vocab_size].sort().values
        head = EagleHead(sizes.config, keep).to(run.device)
        head.start_from(target)
    covered = float(counts[keep].sum() / counts.sum())
    run.log(f"draft vocabulary of {len(keep)} covers {100 * covered:.2f} % of generated tokens")
    rng = np.random.default_rng(run.args.seed)
    shares = np.array([len(s) * s.shape[1] for s in own], dtype=float)

    def batch() -> torch.Tensor:
        draw = rng.random()
        if draw < 0.25:
            length = sizes.head_long_sequence if draw < 0.04 else own[0].shape[1]
            return data.windows(max(1, sizes.head_batch_tokens // length), length, 0.3)
        chosen = own[rng.choice(len(own), p=shares / shares.sum())]
        rows = torch.randint(len(chosen), (max(1, sizes.head_batch_tokens // chosen.shape[1]),))
        return chosen[rows.to(chosen.device)].long()

    def loss_of(_: float) -> tuple[torch.Tensor, torch.Tensor]:
        return distillation_loss(head, target, batch(), sizes.unroll_steps, sizes.unroll_decay)

    def report(progress: float, agreement: torch.Tensor) -> str:
        save_head(head, run.args.models / HEAD_FOLDER)
        if progress > 0.5:
            run.pack(HEAD_FOLDER)
        return "agreement by step " + " ".join(f"{a:.3f}" for a in agreement.tolist())

    every = max(2.0, (until - run.seconds) / 10)
    steps = optimise(run, head, sizes.head_rate, 0.05, until, loss_of, report, every)
    with torch.no_grad(), run.autocast():
        loss, agreement = loss_of(1.0)
    run.log(f"head done: {steps} steps, loss {float(loss):.3f}, {report(0.0, agreement)}")
    run.results["head"] = {
        "steps": steps,
        "tokens_seen": steps * sizes.head_batch_tokens,
        "last_loss": float(loss),
        "last_agreement_by_step": [round(a, 4) for a in agreement.tolist()],
        "draft_vocab_coverage": covered,
    }
    return head


def measure(run: Run, target: TinyMoe, head: EagleHead) -> None:
    """Accept length of a greedy chain of 3 on the held-out prompts, from bf16-rounded weights."""
    sizes, results = run.sizes, {}
    tokenizer = load_tokenizer(run.args.models / TARGET_FOLDER)
    for p in head.parameters():
        p.data = p.data.to(torch.bfloat16).to(p.dtype)
    for name in ("builtin:code", "builtin:text"):
        length = sizes.measured_input_len
        prompts = load_prompts(name, tokenizer, length, sizes.measured_prompts, run.args.seed)
        ids = torch.tensor(prompts.token_ids, device=run.device)
        with torch.no_grad():
            states, _, _ = target(ids[:, :-1])
            loss = F.cross_entropy(target.head(states).flatten(0, 1), ids[:, 1:].flatten())
        full = generate(target, ids, sizes.measured_new, 0.0)
        counts, per_prompt = chain_counts(target, head, full, length, steps=3)
        spread = np.quantile(per_prompt, [0.1, 0.5, 0.9]).round(3).tolist()
        new = full[:, length:].tolist()
        distinct = [distinct_share(ids_) for ids_ in new]
        varied = [i for i, share in enumerate(distinct) if share > 0.8]
        varied_counts = ChainCounts(num_verifies=0, accepted_by_depth=(0, 0, 0))
        if varied:
            varied_counts = chain_counts(target, head, full[varied], length, steps=3)[0]
        few = ids[:4].cpu()
        cpu_target, cpu_head = eager_copy(target).cpu(), head.cpu()
        full_cpu = generate(cpu_target, few, sizes.measured_new // 2, 0.0)
        fast = chain_counts(cpu_target, cpu_head, full_cpu, length, 3)[0]
        naive = naive_chain_counts(cpu_target, cpu_head, few, sizes.measured_new // 2, 3)
        head.to(run.device)
        results[name] = {
            "prompts": len(ids),
            "input_len": length,
            "new_tokens": sizes.measured_new,
            "prompt_loss_nats": round(float(loss), 4),
            "sha256": prompts.sha256,
            "chain3": counts.report(),
            "accept_length_p10_p50_p90": spread,
            "distinct_4gram_share": round(float(np.mean(distinct)), 4),
            "varied_prompts": len(varied),
            "varied_chain3": varied_counts.report(),
            "naive_loop_agrees": fast == naive,
            "samples": [
                [
                    tokenizer.tokenizer.decode(full[i].tolist()[part])
                    for part in (slice(length), slice(length, None))
                ]  # type: ignore[attr-defined]
                for i in range(2)
            ],
        }
        run.log(
            f"{name}: accept length {counts.accept_length:.3f} {counts.accepted_by_depth} of "
            f"{counts.num_verifies}; varied {varied_counts.accept_length:.3f} ({len(varied)}); "
            f"naive loop {naive} agrees: {fast == naive}; prompt loss {loss:.3f}"
        )
    run.results["acceptance"] = results
