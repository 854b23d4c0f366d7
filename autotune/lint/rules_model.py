"""What the performance model says: can this speculation break even, what could NCCL change?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.graphs import Graphs, graphs_of
from autotune.lint.setup import Setup

if TYPE_CHECKING:
    from model.spec import Interval, Prediction

#: a measured step this far above the 95 % end of its interval is beyond the model
_BEYOND = 1.1
#: context of the question where nobody says one, tokens
_CONTEXT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted cycle with speculation and step without, ms (median, 5 %, 95 %), and terms."""

    cycle_ms: tuple[float, float, float]
    plain_ms: tuple[float, float, float]
    accept_length: tuple[float, float, float]
    terms_ms: Mapping[str, float]
    plain_terms_ms: Mapping[str, float]
    #: which forwards were taken to run outside CUDA graphs and why; "" where none does
    graphs: str
    #: why the server would not fit these GPUs, or None
    does_not_fit: str | None

    @property
    def need(self) -> float:
        """Break-even accept length: cycle over plain step, medians."""
        return self.cycle_ms[0] / self.plain_ms[0]

    @property
    def need_low(self) -> float:
        """5 % of it: the cycle's own spread, the plain step at its median."""
        return self.cycle_ms[1] / self.plain_ms[0]

    @property
    def need_high(self) -> float:
        """95 % of it."""
        return self.cycle_ms[2] / self.plain_ms[0]


def forecast(setup: Setup) -> Forecast | None:
    """The model's answer; None without machine, target or a drafting method that it knows.

    Without speculation the cycle is that of the shortest chain; the plain step is what counts.
    """
    spec, machine, target = setup.speculation, setup.machine, setup.target
    if machine is None or target is None or setup.tp is None:
        return None
    tree = (1, 1, 2)
    if spec is not None:
        known = spec.algorithm in ("EAGLE3", "EAGLE", "MTP")
        if not known or spec.steps is None or spec.topk is None or spec.draft_tokens is None:
            return None
        tree = (spec.steps, spec.topk, spec.draft_tokens)
    if target.head_problem(setup.tp) or (machine.gpu is not None and setup.tp > machine.gpu.count):
        return None
    sizes = (*tree, setup.tp, setup.concurrency or 1)
    graphs = graphs_of(setup)
    return _forecast(
        setup.engine,
        _Identity((machine, target)),
        sizes,
        _nccl_knobs(setup.env),
        graphs,
        graphs.text(spec is not None),
    )


def _nccl_knobs(env: Mapping[str, str]) -> tuple[tuple[str, str | int], ...]:
    """Variables that a knob can say, as knobs; lists and exclusions are left to NCCL's default."""
    found: dict[str, str | int] = {}
    for name, knob, words in (
        ("NCCL_ALGO", "nccl.algo", {"ring": "ring", "tree": "tree"}),
        ("NCCL_PROTO", "nccl.proto", {"ll": "LL", "ll128": "LL128", "simple": "Simple"}),
        ("NCCL_P2P_LEVEL", "nccl.p2p_level", {level: level for level in ("PIX", "PHB", "SYS")}),
    ):
        text = env.get(name, "")
        word = words.get(text if knob == "nccl.p2p_level" else text.lower())
        if word is not None:
            found[knob] = word
    for name, knob in (
        ("NCCL_MIN_NCHANNELS", "nccl.min_channels"),
        ("NCCL_MAX_NCHANNELS", "nccl.max_channels"),
    ):
        if env.get(name, "").isdigit() and int(env[name]) > 0:
            found[knob] = int(env[name])
    return tuple(sorted(found.items()))


class _Identity:
    """Models as a cache key: the very objects."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __hash__(self) -> int:
        return hash(tuple(id(value) for value in self.values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and all(
            a is b for a, b in zip(self.values, other.values, strict=True)
        )


@lru_cache(maxsize=8)
def _forecast(
    engine: str,
    models: _Identity,
    sizes: tuple[int, int, int, int, int],
    nccl: tuple[tuple[str, str | int], ...],
    graphs: Graphs,
    said_of_graphs: str,
) -> Forecast | None:
    from model.acceptance import AcceptanceModel
    from model.calibration import default_calibration
    from model.predictor import Predictor
    from model.shapes import DraftShape
    from model.spec import Knobs, Workload

    machine, target = models.values
    steps, topk, draft_tokens, tp, concurrency = sizes
    has_gpu = machine.gpu is not None
    shared = {
        "parallel.tp": tp,
        "collectives.backend": "nccl" if has_gpu else "gloo",
        **(dict(nccl) if has_gpu else {}),
    }
    tree = {
        "speculation.method": "eagle3",
        "speculation.steps": steps,
        "speculation.topk": topk,
        "speculation.draft_tokens": draft_tokens,
    }
    workload = Workload(
        prompts="lint", prompts_sha256="", chat_template=None, input_len=_CONTEXT, output_len=256,
        context=_CONTEXT, temperature=0.0, ignore_eos=True, seed=0, concurrency=concurrency,
    )  # fmt: skip
    predictor = Predictor(
        target,
        DraftShape.standard(target),
        machine,
        default_calibration(machine, engine),
        AcceptanceModel.prior(),
    )

    def predicted(knobs: dict[str, Any], names: Sequence[str]) -> "list[Prediction]":
        """With what is partly captured captured, and without where that differs."""
        hows = {name: getattr(graphs, name) for name in names}
        return [
            predictor.predict(Knobs.of({**shared, **knobs, **_flags(hows, on)}), workload)
            for on in (("full", "partial"), ("full",))[: 1 + ("partial" in hows.values())]
        ]

    try:
        with_spec = predicted(tree, ("draft", "verify", "extend"))
        plain = predicted({}, ("decode",))
    except ValueError:
        # another rule names the impossible tree or the missing version
        return None
    tau = with_spec[0].accept_length
    return Forecast(
        cycle_ms=_between([each.cycle_ms for each in with_spec]),
        plain_ms=_between([each.cycle_ms for each in plain]),
        accept_length=(tau.median, tau.low, tau.high),
        terms_ms=_terms(with_spec),
        graphs=said_of_graphs,
        does_not_fit=with_spec[0].infeasible_reason,
        plain_terms_ms=_terms(plain),
    )


def _flags(hows: Mapping[str, str], on: Sequence[str]) -> dict[str, bool]:
    return {f"cuda_graph.{name}": how in on for name, how in hows.items()}


def _between(intervals: "Sequence[Interval]") -> tuple[float, float, float]:
    """Median, low and high of something that lies between two predictions (or is the one)."""
    best, worst = intervals[0], intervals[-1]
    return math.sqrt(best.median * worst.median), best.low, worst.high


def _terms(predictions: "Sequence[Prediction]") -> dict[str, float]:
    best, worst = predictions[0].terms_ms, predictions[-1].terms_ms
    return {name: math.sqrt(term.median * worst[name].median) for name, term in best.items()}


@rule("spec-break-even", "sgl-project/SpecForge#339, #6949; speculation.md 1.5")
def can_it_break_even(setup: Setup) -> Iterator[Hit]:
    """Accept length needed (cycle over plain step) against what is known or possible."""
    found = forecast(setup)
    spec = setup.speculation
    if found is None or spec is None or spec.steps is None:
        return
    need = found.need
    verify = sum(ms for name, ms in found.terms_ms.items() if name.startswith("verify."))
    reduce = found.terms_ms.get("verify.allreduce", 0.0)
    fixed = found.cycle_ms[0] - verify
    host = "" if setup.machine is None else setup.machine.name
    graphs = f", {found.graphs}" if found.graphs else ""
    numbers = (
        f"predicted on {host} at {setup.concurrency or 1} request(s){graphs}: cycle "
        f"{found.cycle_ms[0]:.1f} ms (90 %: {found.cycle_ms[1]:.1f}-{found.cycle_ms[2]:.1f}; "
        f"verify {verify:.1f}, of it all-reduce {reduce:.1f}; draft, extend, sampling and gaps "
        f"{fixed:.1f}) against {found.plain_ms[0]:.1f} ms plain: break-even accept length "
        f"{need:.2f}"
    )
    subject = spec.text()
    known = setup.accept_length
    if known is not None:
        verdict = f"{numbers}; yours is {known:.2f}"
        if known < found.need_low:
            yield error(
                subject,
                f"{verdict}: slower than no speculation",
                "fewer draft tokens, another draft, or no speculation",
            )
        elif known < found.need_high:
            likely = "probably slower" if known < need else "perhaps faster, perhaps slower"
            yield warning(
                subject,
                f"{verdict}: {likely} than no speculation, the interval holds it",
                "measure it against the baseline with the same options; fewer draft tokens",
            )
        else:
            yield info(subject, f"{verdict}: it pays", "")
        return
    largest = spec.steps + 1
    median, low, high = found.accept_length
    if found.need_low > largest:
        yield error(
            subject,
            f"{numbers}, more than the {largest} that {spec.steps} steps can ever give",
            "no speculation at this load",
        )
    elif need > high:
        yield warning(
            subject,
            f"{numbers}; EAGLE-3 heads give {median:.2f} (90 %: {low:.2f}-{high:.2f}) at this size",
            "fewer draft tokens, or no speculation at this load; measure the accept length",
        )
    else:
        yield info(
            subject,
            f"{numbers}; EAGLE-3 heads give {median:.2f} (90 %: {low:.2f}-{high:.2f}) at this size",
            "give --accept-length to judge it",
        )


@rule("memory-does-not-fit", "sgl-project/sglang PR #21898 (crashes and out of memory)")
def weights_and_cache_exceed_the_gpu(setup: Setup) -> Iterator[Hit]:
    """Weights, KV cache of the load, draft and graphs against the memory of a GPU."""
    found = forecast(setup)
    if found is not None and found.does_not_fit is not None:
        yield error(
            f"{setup.tp} ranks, {setup.concurrency or 1} requests",
            f"predicted for a context of {_CONTEXT} tokens: {found.does_not_fit}",
            "more ranks, a smaller or quantised target, or fewer requests",
        )


@rule("spec-expert-union", "sgl-project/SpecForge#339; MoESD equation 8")
def verify_reads_more_experts(setup: Setup) -> Iterator[Hit]:
    """A verify of n tokens reads the union of their experts."""
    target, spec = setup.target, setup.speculation
    if target is None or spec is None or spec.draft_tokens is None or not target.moe_layers:
        return
    share = target.experts_per_token / target.experts
    if share > 0.25 or setup.verify_tokens < 2:
        return
    one, many = (
        target.experts * (1.0 - (1.0 - share) ** tokens) for tokens in (1, spec.draft_tokens)
    )
    yield info(
        spec.text(),
        f"{target.name} activates {target.experts_per_token} of {target.experts} experts a token: "
        f"a verify of {spec.draft_tokens} tokens reads up to {many:.0f} a layer, {many / one:.1f} "
        "x those of a plain step (uniform routing; correlated routing reads fewer)",
        "a smaller tree reads fewer experts; compare the break-even accept length",
    )


@rule("log-below-break-even", "the story: 59-61 tok/s with speculation, 82-83 without; vllm#44697")
def slower_than_baseline(setup: Setup) -> Iterator[Hit]:
    """Measured speed, accept length and baseline give the break-even length, without a model."""
    log, baseline = setup.log, setup.baseline_tokens_per_s
    tau = setup.accept_length
    if log is None or baseline is None or setup.speculation is None:
        return
    speed, running = measured_speed(setup)
    if speed is None or speed >= baseline:
        return
    if tau is None:
        yield error(
            f"{speed:.1f} tok/s against {baseline:.1f} without speculation",
            f"a token takes {running * 1e3 / speed:.1f} ms, without speculation "
            f"{running * 1e3 / baseline:.1f}; the log shows no accept length, so rounds cannot be "
            "told from acceptance",
            "log the accept length; print the fixed part of a round (draft passes, all-reduces, "
            "sampling) beside the verify: it does not shrink with more ranks",
        )
        return
    cycle, plain = running * tau * 1e3 / speed, running * 1e3 / baseline
    lost = cycle - plain * tau
    first = next((d.positions[0] for d in log.steady() if d.positions), None)
    fine = (first is not None and first >= 0.6) or (first is None and tau >= 2.0)
    cause = (
        f"acceptance is fine; {lost:.1f} ms of every round must go: draft passes, launches and "
        "collectives that do not shrink"
        if fine
        else "both acceptance and cost of a round stand in the way"
    )
    yield error(
        f"{speed:.1f} tok/s against {baseline:.1f} without speculation",
        f"a round takes {cycle:.1f} ms, a plain step {plain:.1f}: break-even accept length "
        f"{cycle / plain:.2f}, measured {tau:.2f}. {cause}{_explained(setup, cycle)}",
        "look at graph state and attention backend of the verify first; no speculation meanwhile",
    )


@rule("log-step-above-model", "local-inference-lab/rtx6kpro#25 (12-16 ms fixed per forward)")
def step_above_prediction(setup: Setup) -> Iterator[Hit]:
    """A measured step beyond the model's interval: something is there that physics does not ask."""
    speed, running = measured_speed(setup)
    found = forecast(setup)
    plain = setup.speculation is None
    tau = 1.0 if plain else setup.accept_length
    if found is None or speed is None or tau is None:
        return
    cycle = running * tau * 1e3 / speed
    expected = found.plain_ms if plain else found.cycle_ms
    if running == (setup.concurrency or 1) and cycle > _BEYOND * expected[2]:
        terms = found.plain_terms_ms if plain else found.terms_ms
        reduce = terms.get("decode.allreduce" if plain else "verify.allreduce", 0.0)
        yield warning(
            f"{cycle:.1f} ms a {'step' if plain else 'round'}",
            f"predicted {expected[0]:.1f} ms (90 %: up to {expected[2]:.1f}"
            f"{', ' if found.graphs else ''}{found.graphs}), of which "
            f"all-reduce {reduce:.1f} ms: {cycle - expected[0]:.1f} ms are unexplained, more "
            "than NCCL settings could give back on a healthy host",
            "in this order: graph state, attention backend, MoE kernel for more than one token, "
            "then the all-reduce micro-benchmark and peer-to-peer faults",
        )


def _explained(setup: Setup, cycle_ms: float) -> str:
    found = forecast(setup)
    if found is None:
        return ""
    reduce = found.terms_ms.get("verify.allreduce", 0.0)
    return (
        f". The model expects {found.cycle_ms[0]:.1f} ms a round; all communication in it is "
        f"{reduce:.1f} ms, the most that NCCL settings can move"
    )


def measured_speed(setup: Setup) -> tuple[float | None, int]:
    """Median tokens/s of the steady decode lines with the most usual batch, and that batch."""
    log = setup.log
    if log is None:
        return None, 1
    rows = [d for d in log.steady() if d.tokens_per_s and d.running]
    if rows:
        batches = [d.running for d in rows]
        batch = max(set(batches), key=batches.count) or 1
        speeds = sorted(d.tokens_per_s or 0.0 for d in rows if d.running == batch)
        return speeds[len(speeds) // 2], batch
    tpot = log.bench.get("mean_tpot_ms")
    if tpot:
        batch = max(round(log.bench.get("concurrency", 1.0)), 1)
        return batch * 1e3 / tpot, batch
    return None, 1
