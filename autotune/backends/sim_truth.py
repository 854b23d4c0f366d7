"""The hidden truth behind the simulated backend: other constants, and terms no predictor has.

The base is the performance model with every constant moved by a per-seed draw of its prior. On top
come a kernel-path jump at two and more tokens, experts that stay in cache, experts picked together
by one request, and a smooth effect of the knobs that nothing explains. Nothing here is given to
the predictor.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from autotune.backends.sim_acceptance import HiddenAcceptance
from autotune.backends.sim_noise import stream
from autotune.schemas import Schema
from model.acceptance import AcceptanceModel
from model.constants import from_scale, to_scale
from model.predictor import Predictor
from model.spec import CYCLE_TERMS, DECODE_TERMS, Interval, Knobs, Workload


class TruthArgs(Schema):
    """Sizes of what the predictor lacks; the defaults follow reports of real hosts."""

    #: how far each constant lies from its prior, in prior standard deviations (sd of the draw)
    constants_spread: float = 0.5
    #: a target forward over 2 or more tokens against one token, beyond what the model knows:
    #: 14.5 to 21.0 ms was seen on 4 x A100 PCIe, a switch from one-row to batched kernels
    kernel_jump: float = 0.2
    #: share of expert reads that a small batch finds in cache, fading with the number of tokens
    cache_hit: float = 0.1
    #: sd of the log ratio of experts touched, verify against what the model expects
    expert_correlation: float = 0.1
    #: amplitude of the unexplained smooth effect of the knobs
    smooth_effect: float = 0.02
    #: GiB per GPU that the host holds back beyond what the model counts
    hidden_memory_gib: float = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class TrueCycle:
    """Mean time of one cycle at one number of running requests, ms by term."""

    terms_ms: Mapping[str, float]
    #: terms that the host launches: they feel a slow host
    host_launched: frozenset[str]

    @property
    def cycle_ms(self) -> float:
        """Sum of the terms."""
        return sum(self.terms_ms.values())


class Truth:
    """True times, acceptance and memory of one simulated host, deterministic per seed."""

    def __init__(self, predictor: Predictor, seed: int, args: TruthArgs) -> None:
        self._args = args
        self._seed = seed
        draws = stream(seed, "truth")
        moved = {}
        for constant in predictor.calibration.constants:
            shift = args.constants_spread * constant.prior_sd * float(draws.normal())
            x = to_scale(constant.prior, constant.scale) + shift
            moved[constant.name] = float(from_scale(x, constant.scale))
        hidden = predictor.calibration.with_values(**moved)
        self._model = dataclasses.replace(predictor, calibration=hidden)
        self._jump = args.kernel_jump * math.exp(0.4 * float(draws.normal()))
        self._cache_tokens = 4.0 * math.exp(0.4 * float(draws.normal()))
        self._correlation = args.expert_correlation * float(draws.normal())
        self._waves = draws.uniform(0.0, 2.0 * math.pi, size=8)
        self._weights = draws.normal(size=8) / math.sqrt(8.0)
        self.acceptance = _hidden_acceptance(draws)
        self._cycles: dict[tuple[Knobs, Workload], TrueCycle] = {}
        self._memory_gib: dict[tuple[Knobs, Workload], float] = {}

    def cycle(self, knobs: Knobs, workload: Workload) -> TrueCycle:
        """The mean cycle while ``workload.concurrency`` requests run."""
        key = (knobs, workload)
        if key not in self._cycles:
            self._cycles[key] = self._cycle(knobs, workload)
        return self._cycles[key]

    def memory_problem(self, knobs: Knobs, workload: Workload) -> str | None:
        """Why these knobs run out of memory on the simulated host, or None."""
        key = (knobs, workload)
        if key not in self._memory_gib:
            self._memory_gib[key] = self._model.predict(knobs, workload).memory_gib_per_gpu
        there = self._model.step.device(knobs.tp).memory_bytes / 2**30
        needed = self._memory_gib[key] + self._args.hidden_memory_gib
        if needed <= there:
            return None
        return f"simulated out of memory: {needed:.1f} GiB per rank needed, {there:.1f} GiB there"

    def ttft_ms(self, knobs: Knobs, workload: Workload) -> float:
        """Mean time to the first token: the prompt's forwards in steps of 512 tokens, by turns."""
        plain = Knobs.of({**knobs.values(), "speculation.method": "off"})
        wide = dataclasses.replace(workload, concurrency=min(workload.input_len, 512))
        forwards = math.ceil(workload.input_len / 512) * (workload.concurrency + 1) / 2.0
        return forwards * self.cycle(plain, wide).cycle_ms

    def _cycle(self, knobs: Knobs, workload: Workload) -> TrueCycle:
        prediction = self._model.predict(knobs, workload)
        speculative = knobs.method != "off"
        prefix = "verify." if speculative else "decode."
        names = CYCLE_TERMS if speculative else DECODE_TERMS
        terms = {name: _value(prediction.terms_ms[name]) for name in names}
        tokens = workload.concurrency * (knobs.draft_tokens if speculative else 1)
        moe = terms[prefix + "moe"]
        if tokens >= 2:
            jumping = moe + terms[prefix + "attention"] + terms[prefix + "other"]
            terms[prefix + "other"] += self._jump * jumping
            terms[prefix + "moe"] = moe * math.exp(self._correlation * math.log2(tokens) / 3.0)
        terms[prefix + "moe"] *= 1.0 - self._args.cache_hit * math.exp(-tokens / self._cache_tokens)
        smooth = math.exp(self._args.smooth_effect * self._smooth(knobs, workload))
        graphs = {
            "draft": knobs.graph_draft,
            "extend": knobs.graph_extend,
            "verify": knobs.graph_verify,
            "decode": knobs.graph_decode,
        }
        launched = {name for name in names if not graphs.get(name.split(".")[0], False)}
        return TrueCycle(
            {name: value * smooth for name, value in terms.items()}, frozenset(launched)
        )

    def _smooth(self, knobs: Knobs, workload: Workload) -> float:
        """A fixed wave over the numeric knobs, of unit size."""
        features = np.array(
            [
                knobs.steps,
                knobs.topk,
                math.sqrt(knobs.draft_tokens),
                math.log2(workload.concurrency + 1),
                float(knobs.graph_verify),
                float(knobs.nccl_max_channels or 0) ** 0.5,
                float(knobs.nccl_proto != "auto"),
                float(knobs.nccl_algo != "auto"),
            ]
        )
        return float(self._weights @ np.sin(features + self._waves)) * math.sqrt(2.0)


def _value(predicted: Interval) -> float:
    return predicted.median


def _hidden_acceptance(draws: np.random.Generator) -> HiddenAcceptance:
    """A head near the model's prior, moved by a draw of each parameter.

    The prior, not what a predictor has learnt: a resumed study must meet the same host again.
    """
    rates = AcceptanceModel.prior().rates()
    top1, second = float(rates[0, 0]), float(rates[1, 0])
    odds = top1 / (1.0 - top1) * math.exp(0.25 * float(draws.normal()))
    rest = float(rates[0, 1:].sum()) / (1.0 - top1)
    return HiddenAcceptance(
        top1=odds / (1.0 + odds),
        decay=min(second / top1 * math.exp(0.03 * float(draws.normal())), 1.0),
        rank_mass=min(max(rest * math.exp(0.1 * float(draws.normal())), 0.0), 0.98),
        rank_exponent=1.55 * math.exp(0.1 * float(draws.normal())),
        request_spread=0.3,
        verify_spread=0.8,
    )
