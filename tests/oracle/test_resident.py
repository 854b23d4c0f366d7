"""Cycles with their state on the device: over ranks, padded batches, and synthetic acceptance."""

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build, resident, resolve
from engine.collectives import LocalGroup, OneShotGroup
from engine.config import DraftSpec, LaunchConfig, SpeculationConfig, TargetSpec
from engine.graphs import Segment
from engine.resident import BUCKETS, bucket
from engine.results import Request
from engine.runner import Runner
from engine.shared_memory import SharedMemoryGroup, region_bytes
from engine.stream import _phases
from kernels.cycle import force_ref

OFF = SpeculationConfig()
CHAIN = SpeculationConfig(method="eagle3", steps=3, topk=1)
TREE = SpeculationConfig(method="eagle3", steps=3, topk=2, draft_tokens=6)


def _requests(new: int = 30, count: int = 5) -> list[Request]:
    draws = torch.Generator().manual_seed(9)
    return [
        Request(
            prompt_ids=tuple(torch.randint(1, 300, (4 + 3 * n,), generator=draws).tolist()),
            max_new_tokens=new + n,
            ignore_eos=True,
        )
        for n in range(count)
    ]


def _drawn(new: int = 30, count: int = 5) -> list[Request]:
    """The same requests, every second one sampled."""
    return [
        replace(r, temperature=25.0, seed=2**40 + n) if n % 2 else r
        for n, r in enumerate(_requests(new, count))
    ]


def _rank_main(rank: int, tp: int, fd: int, folder: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    config = LaunchConfig(
        target=TargetSpec(path=str(folder / "target")),
        draft=DraftSpec(path=str(folder / "eagle3")),
        tp=tp,
        max_context=128,
        max_concurrency=3,
    )
    with torch.inference_mode():
        group = OneShotGroup(SharedMemoryGroup(fd, rank, tp, timeout_s=60))
        shapes = resolve(config)
        executor, head = build(config, shapes, group, torch.device("cpu"))
        executor.resident = resident(executor, head, config)
        runs = []
        for asks, speculation in product((_requests(), _drawn()), (OFF, CHAIN, TREE)):
            if rank == 0:
                runner = Runner(executor, head, slots=3, eos_ids=())
                run = runner.run(asks, speculation, concurrency=3)
                runs.append((run.path, [r.token_ids for r in run.requests]))
            else:
                executor.follow()
        # every rank advanced its own state: all must have come to the same
        state = executor.resident.state_4B.tolist()
    pipe.send((runs, state))


def test_ranks_decide_alike_without_an_order_a_cycle(
    local: Callable[..., Any], small_pair: Path
) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, region_bytes(2))
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        child = context.Process(target=_rank_main, args=(rank, 2, fd, small_pair, theirs))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    (runs, state), (_, other_state) = (pipe.recv() for pipe in pipes)
    for child in children:
        child.join(20)
    os.close(fd)
    greedy = local(small_pair / "target", max_context=128)
    # drawn tokens are those of the same cycles on one rank
    drawn = local(small_pair / "target", max_context=128, on_device=True)
    for engine, asks, found in ((greedy, _requests(), runs[:3]), (drawn, _drawn(), runs[3:])):
        alone = engine.runner.run(asks, OFF, concurrency=1)
        expected = [r.token_ids for r in alone.requests]
        assert [path for path, _ in found] == ["resident"] * 3
        assert all(tokens == expected for _, tokens in found)
    assert runs[0][1][1] != runs[3][1][1]
    assert state == other_state


@pytest.mark.parametrize("on_device", [False, True], ids=["stepwise", "resident"])
@pytest.mark.parametrize(
    ("rates", "lengths"),
    [((1.0, 1.0, 0.0), {3}), ((1.0, 1.0, 1.0), {4}), ((0.0, 0.0, 0.0), {1})],
)
def test_synthetic_acceptance_fixes_the_accept_length(
    local: Callable[..., Any],
    small_pair: Path,
    on_device: bool,
    rates: tuple[float, ...],
    lengths: set[int],
) -> None:
    engine = local(
        small_pair / "target",
        small_pair / "eagle3",
        on_device=on_device,
        max_context=128,
        max_concurrency=2,
    )
    for topk, draft_tokens in ((1, 4), (2, 10)):
        speculation = SpeculationConfig(
            method="eagle3",
            steps=3,
            topk=topk,
            draft_tokens=draft_tokens,
            synthetic_acceptance=rates,
        )
        run = engine.runner.run(_requests(24, 3), speculation, concurrency=2)
        assert {n for r in run.requests for n in r.tokens_per_verify} == lengths
        assert [len(r.token_ids) for r in run.requests] == [24, 25, 26]


def test_synthetic_rates_are_unconditional() -> None:
    """vLLM's [0.8, 0.6, 0.4]: shares of verifies that reach each depth."""
    num = 20_000
    token = torch.arange(4).repeat(num, 1)
    chain, draw = torch.arange(4).repeat(num, 1), torch.zeros(1, dtype=torch.int64)
    uniform = torch.rand(1, num, generator=torch.Generator().manual_seed(1))
    forced = force_ref(token, chain - 1, chain, uniform, draw, torch.tensor([0.8, 0.6, 0.4]))
    reached = [float((forced[:, d] == d + 1).float().mean()) for d in range(3)]
    assert reached == pytest.approx([0.8, 0.6, 0.4], abs=0.012)


@pytest.mark.parametrize("spec", [OFF, CHAIN, TREE], ids=["off", "chain", "tree"])
def test_flights_of_cycles_change_no_token(
    local: Callable[..., Any], small_pair: Path, spec: SpeculationConfig
) -> None:
    """Requests of unequal lengths, some waiting: in flights where nothing can end, else singly."""
    engine = local(
        small_pair / "target",
        small_pair / "eagle3",
        on_device=True,
        max_context=192,
        max_concurrency=3,
    )
    flown, fly = [], engine.executor.resident.fly
    engine.executor.resident.fly = lambda *args: flown.append(1) or fly(*args)
    asks = _requests(70)
    in_flights = engine.runner.run(asks, spec, concurrency=3)
    assert flown
    # a request that may end early is followed cycle by cycle
    flown.clear()
    singly = [replace(r, ignore_eos=False) for r in asks]
    one_by_one = engine.runner.run(singly, spec, concurrency=3)
    assert not flown
    tokens = [r.token_ids for r in in_flights.requests]
    assert [len(t) for t in tokens] == [70, 71, 72, 73, 74]
    for whole, cut in zip(tokens, one_by_one.requests, strict=True):
        assert whole[: len(cut.token_ids)] == cut.token_ids
    assert sum(r.finish_reason == "length" for r in one_by_one.requests) > 0


def test_long_prompts_are_taken_in_chunks(
    local: Callable[..., Any], small_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefill.PREFILL_CHUNK", 16)
    draws = torch.Generator().manual_seed(2)
    asks = [
        Request(
            prompt_ids=tuple(torch.randint(1, 300, (n,), generator=draws).tolist()),
            max_new_tokens=9,
            ignore_eos=True,
        )
        for n in (17, 1, 32, 16, 50)
    ]
    settings = {"max_context": 128, "max_concurrency": 3}
    pair = (small_pair / "target", small_pair / "eagle3")
    stepwise, engine = local(*pair, **settings), local(*pair, on_device=True, **settings)
    for spec in (OFF, CHAIN, TREE):
        whole = stepwise.runner.run(asks, spec, concurrency=3)
        run = engine.runner.run(asks, spec, concurrency=3)
        assert [r.token_ids for r in run.requests] == [r.token_ids for r in whole.requests]
        # the head has seen the prompt's pairs too, or it would draft otherwise
        assert run.counters == whole.counters


def test_a_batch_runs_at_the_next_bucket_and_reports_its_segments(
    local: Callable[..., Any], small_pair: Path
) -> None:
    engine = local(
        small_pair / "target",
        small_pair / "eagle3",
        on_device=True,
        max_context=128,
        max_concurrency=3,
    )
    run = engine.runner.run(_requests(), CHAIN, concurrency=3)
    assert run.path == "resident"
    assert any(name.startswith("verify[B=4,T=4") for name in run.graphs)
    assert set(run.graphs.values()) == {"eager: no CUDA device"}
    assert [bucket(n) for n in (1, 3, 5, 64, 300)] == [1, 4, 8, 64, 300]
    assert list(BUCKETS) == sorted(BUCKETS)


def test_runs_that_need_the_host_each_cycle_say_why(
    local: Callable[..., Any], small_pair: Path
) -> None:
    engine = local(small_pair / "target", on_device=True, max_context=128)
    asks = [Request(prompt_ids=(3, 4), max_new_tokens=3)]
    run = engine.runner.run(asks, OFF, concurrency=1, margins=True)
    assert run.path == "stepwise: margins asked for"


def test_not_a_number_stops_the_run_with_the_request(
    local: Callable[..., Any], small_pair: Path
) -> None:
    from engine.errors import EngineError

    engine = local(small_pair / "target", on_device=True, max_context=128)
    engine.runner.run(_requests(3, 1), OFF, concurrency=1)
    engine.executor.model.weights.layers[0].down_EHI.fill_(float("nan"))
    with pytest.raises(EngineError, match=r"NaN"):
        engine.runner.run(_requests(3, 1), OFF, concurrency=1)


def test_segments_without_a_gpu_run_their_body() -> None:
    seen = []
    segment = Segment("s", lambda timer: seen.append(timer), torch.device("cpu"))
    segment.capture(None, switched_on=True, with_laps=True)
    assert seen == []
    segment.run()
    segment.run_with_laps()
    assert len(seen) == 2
    assert segment.reason == "no CUDA device"


def test_phases_split_a_segment_by_its_laps_and_sum_to_the_cycle() -> None:
    means = {"draft": 1.0, "verify": 4.0, "extend": 0.5, "host_gap": 0.5}
    laps = {"verify.moe": 30.0, "verify.head": 10.0, "sample": 10.0}
    phases = _phases(means, laps, 12.0)
    assert sum(phases.values()) == pytest.approx(12.0)
    assert phases["verify.moe"] == pytest.approx(2 * 4.0 * 0.6)
    assert phases["draft"] == pytest.approx(2.0)
    # without laps nothing is invented
    assert _phases({"decode": 2.0}, {}, 2.0) == {"decode.other": 2.0}


#: the state of a batch is the first columns of a wider matrix, and these ops walk it as such
_STATE = {("finish", 4), ("finish_ranks", 1), ("settle", 7)}


def _strict(name: str, op: Any, seen: set[str]) -> Any:
    """``op`` as a kernel sees its arguments: indices, masks and rows lie one after the other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for place, value in enumerate(args):
            if (name, place) in _STATE:
                continue
            if isinstance(value, torch.Tensor) and value.ndim <= 2 and value.numel() > 1:
                assert value.stride(-1) == 1, f"{name} argument {place}: stride {value.stride()}"
                if not value.is_floating_point():
                    assert value.is_contiguous(), f"{name} argument {place}: {value.stride()}"
                elif value.ndim == 2 and value.shape[0] > 1:
                    assert value.stride(0) >= value.shape[1], f"{name} argument {place}: overlaps"
        seen.add(name)
        return op(*args, **kwargs)

    return call


@pytest.mark.parametrize("on_device", [False, True], ids=["stepwise", "resident"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_ops_get_tensors_that_kernels_can_walk(
    local: Callable[..., Any], small_pair: Path, on_device: bool, concurrency: int
) -> None:
    """Kernels take a pointer and count up: an expanded view would be read past its end."""
    engine = local(
        small_pair / "target",
        small_pair / "eagle3",
        on_device=on_device,
        max_context=128,
        max_concurrency=3,
    )
    seen: set[str] = set()
    plain = engine.executor.model.ops
    names = [f.name for f in fields(plain) if f.name != "name"]
    strict = replace(plain, **{n: _strict(n, getattr(plain, n), seen) for n in names})
    engine.executor.model.ops = engine.executor.model.dense.ops = strict
    engine.draft.ops = engine.draft.dense.ops = strict
    for speculation in (OFF, CHAIN, TREE):
        for asks in (_requests(12, 3), _drawn(12, 3)):
            engine.runner.run(asks, speculation, concurrency=concurrency)
    assert ("draw" if on_device else "sample") in seen
    assert {"kv_compact", "tree_mask", "verify_greedy"} <= seen
    assert ("qkv_attention" if on_device else "qk_norm_rope") in seen


def test_random_weights_route_the_tokens_of_a_sequence_apart(tmp_path: Path) -> None:
    """Else a verify would touch as few experts as one token, and its time would flatter."""
    tokens, experts, chosen = 4, 64, 4
    shape = {
        "model_type": "qwen3_moe",
        "vocab_size": 3000,
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 16,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = LaunchConfig(
        target=TargetSpec(shape=str(tmp_path), weights="random"),
        draft=DraftSpec(weights="random", vocab=2000),
        max_context=256,
    )
    executor, head = build(config, resolve(config), LocalGroup(), torch.device("cpu"))
    executor.resident = resident(executor, head, config)
    model, logs = executor.model, []
    forward = model.forward_few

    def logged(batch: Any, timer: Any, phase: str, *rest: Any, **more: Any) -> Any:
        model.expert_log = []
        out = forward(batch, timer, phase, *rest, **more)
        if phase == "verify":
            logs.append([layer.unique().numel() for layer in model.expert_log])
        model.expert_log = None
        return out

    model.forward_few = logged  # type: ignore[method-assign]
    draws = torch.Generator().manual_seed(4)
    prompt = tuple(torch.randint(1, 3000, (150,), generator=draws).tolist())
    spec = CHAIN.model_copy(update={"synthetic_acceptance": (1.0, 1.0, 0.0)})
    run = Runner(executor, head, slots=1, eos_ids=()).run(
        [Request(prompt_ids=prompt, max_new_tokens=40, ignore_eos=True)], spec, concurrency=1
    )
    expected = experts * (1 - (1 - chosen / experts) ** tokens)
    # the first cycle's drafts come from before the run's state was warm
    found = torch.tensor(logs[1:], dtype=torch.float32)
    assert float(found.mean()) == pytest.approx(expected, rel=0.1)
    assert float(found[:, -1].mean()) == pytest.approx(expected, rel=0.15)
    assert len(set(run.requests[0].token_ids)) > 30


@pytest.mark.parametrize(
    ("longest", "built"),
    [pytest.param(40, {4}, id="short-tail"), pytest.param(160, {4, 1}, id="long-tail")],
)
def test_only_a_long_tail_builds_a_smaller_batch(
    local: Callable[..., Any], small_pair: Path, longest: int, built: set[int]
) -> None:
    engine = local(small_pair / "target", on_device=True, max_context=192, max_concurrency=3)
    lengths = (8, 8, longest)
    asks = [
        Request(prompt_ids=(5, 6 + n), max_new_tokens=new, ignore_eos=True)
        for n, new in enumerate(lengths)
    ]
    run = engine.runner.run(asks, OFF, concurrency=3)
    names = [name for name in run.graphs if name.startswith("decode")]
    assert {int(name.removeprefix("decode[B=").removesuffix("]")) for name in names} == built
    alone = [engine.runner.run([ask], OFF, concurrency=1).requests[0].token_ids for ask in asks]
    assert [r.token_ids for r in run.requests] == alone
