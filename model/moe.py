"""Time of one MoE layer kernel from the experts it reads, and the constants behind it.

time = fixed + max(floor, touched expert bytes / bandwidth) + work of all assignments + tail of the
fullest expert.
Bytes dominate a decode step: every distinct expert is read once, from DRAM, because a step of many
layers leaves nothing of a layer in the L2. Stand-alone benchmarks repeat one layer, so rows whose
bytes fit the cache run faster than DRAM allows; ``resident_share`` describes those rows and
is zero inside a step.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.constants import Constant, as_mapping
from model.formats import bytes_per_weight
from model.intervals import Z90
from model.robust import Fit, robust_map
from model.routing import balanced_loads, power_law_loads

Array = NDArray[Any]

#: weight types of the published tables -> our formats
WEIGHT_FORMATS: Mapping[str, str] = {
    "int4_wo": "int4_g32",
    "fp8_block": "fp8_block128",
    "nvfp4": "nvfp4",
    "bfloat16": "bf16",
    "float16": "fp16",
}
_SIZES = ("hidden", "intermediate", "experts", "top_k", "tp", "tokens")
CSV_COLUMNS = ("gpu", "kernel", "weight_dtype", *_SIZES, "routing", "time_us")
#: a row is cold when its bytes exceed the L2 by this factor
COLD_FACTOR = 1.3
#: below this share of the L2 all touched bytes stay resident between repeats
RESIDENT_BELOW = 0.75
#: spread of one row that the fit cannot see, relative
_ROW_SD = 0.03
_HOT_SD = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRow:
    """One benchmark row: a layer of ``experts`` on one rank of ``tp``."""

    gpu: str
    kernel: str
    weight_format: str
    hidden: int
    intermediate: int
    experts: int
    per_token: int
    tp: int
    routing: str
    tokens: int
    time_us: float

    @property
    def loads(self) -> NDArray[np.int64]:
        """Tokens per expert under the row's routing law."""
        exponent = self.routing_exponent()
        if exponent is None:
            return balanced_loads(self.tokens, self.experts, self.per_token)
        return power_law_loads(self.tokens, self.experts, self.per_token, exponent)

    def routing_exponent(self) -> float | None:
        """Exponent of a power law, None for balanced routing; ``ValueError`` for another."""
        law, _, alpha = self.routing.rpartition("_")
        try:
            exponent = float(alpha) if law == "power_law" else float("nan")
        except ValueError:
            exponent = float("nan")
        if self.routing != "balanced" and not 0 < exponent < 10:
            raise ValueError(
                f"routing {self.routing!r} is unknown; known: balanced, power_law_<exponent>"
            )
        return None if self.routing == "balanced" else exponent

    @property
    def expert_bytes(self) -> float:
        """Bytes of this rank's slice of one expert."""
        weights = 3 * self.hidden * self.intermediate / self.tp
        return weights * bytes_per_weight(self.weight_format)


def read_moe_rows(path: Path | str) -> list[MoeRow]:
    """Rows of a CSV like moe-layer-published.csv; raises ``ValueError`` naming line and column."""
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in CSV_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: column {missing[0]!r} is missing")
        for row in reader:
            try:
                rows.append(_row_of(row))
            except ValueError as error:
                raise ValueError(f"{path} line {reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _row_of(row: Mapping[str, str | None]) -> MoeRow:
    text = {name: row[name] or "" for name in CSV_COLUMNS}
    if text["weight_dtype"] not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise ValueError(f"weight_dtype {text['weight_dtype']!r} is unknown; known: {known}")
    values = {name: _whole(name, text[name]) for name in _SIZES}
    if values["top_k"] > values["experts"]:
        raise ValueError(f"top_k {values['top_k']} is above experts {values['experts']}")
    try:
        time_us = float(text["time_us"])
    except ValueError:
        time_us = float("nan")
    if not 0 < time_us < 60e6:
        raise ValueError(f"time_us {text['time_us']!r} must be a time > 0 us, below a minute")
    found = MoeRow(
        gpu=text["gpu"],
        kernel=text["kernel"],
        weight_format=WEIGHT_FORMATS[text["weight_dtype"]],
        per_token=values.pop("top_k"),
        routing=text["routing"],
        time_us=time_us,
        **values,
    )
    found.routing_exponent()
    return found


def _whole(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value >= 1 and value.is_integer() and value < 1e9):
        raise ValueError(f"{name} {text!r} must be a whole number >= 1")
    return int(value)


@dataclass(frozen=True, slots=True)
class MoeWork:
    """What rows do, [N] each: MB of touched experts, Gflop of all and of the fullest expert."""

    megabytes: Array
    gflop: Array
    fullest_gflop: Array
    #: touched bytes over the L2 size
    cache_ratio: Array

    @classmethod
    def of(cls, rows: Sequence[MoeRow], l2_bytes: float) -> "MoeWork":
        """Work of the rows on a GPU with this L2."""
        loads = [row.loads for row in rows]
        distinct = np.array([np.count_nonzero(x) for x in loads], dtype=float)
        expert = np.array([row.expert_bytes for row in rows])
        flop = np.array([6.0 * row.hidden * row.intermediate / row.tp for row in rows])
        return cls(
            distinct * expert / 1e6,
            np.array([x.sum() for x in loads]) * flop / 1e9,
            np.array([x.max() for x in loads]) * flop / 1e9,
            distinct * expert / l2_bytes,
        )

    @property
    def cold(self) -> NDArray[np.bool_]:
        """Rows that read DRAM, as every layer of a step does."""
        return self.cache_ratio > COLD_FACTOR


def resident_share(cache_ratio: Array) -> Array:
    """Share of the touched bytes that a repeated layer finds in the L2 (0 inside a step)."""
    width = COLD_FACTOR - RESIDENT_BELOW
    return np.clip((COLD_FACTOR - cache_ratio) / width, 0.0, 1.0)


def layer_us(work: MoeWork, c: Mapping[str, Array], *, in_step: bool) -> Array:
    """Time of the layer, [D, N]; ``in_step`` reads everything cold."""
    share = np.zeros_like(work.cache_ratio) if in_step else resident_share(work.cache_ratio)
    dram = work.megabytes / (c["dram_gb_per_s"] * 1e-3)
    cached = dram / c["l2_over_dram"]
    moved = share * cached + (1.0 - share) * dram
    result: Array = (
        c["fixed_us"]
        + np.maximum(moved, c["floor_us"])
        + work.gflop * c["gflop_us"]
        + work.fullest_gflop * c["fullest_gflop_us"]
    )
    return result


def kernel_priors(dram_gb_per_s: float, bf16_tflops: float) -> tuple[Constant, ...]:
    """Priors of one kernel's constants on a GPU of these peak rates."""
    source = "judged; wide"

    def log(name: str, value: float, unit: str, sd: float) -> Constant:
        return Constant(
            name=name, value=value, unit=unit, prior=value, prior_sd=sd, scale="log", source=source
        )

    return (
        log("fixed_us", 25.0, "us", 1.0),
        log("floor_us", 12.0, "us, least time of the weight loops", 1.0),
        log("dram_gb_per_s", 0.75 * dram_gb_per_s, "GB/s", 0.3),
        log("gflop_us", 1e3 / bf16_tflops / 0.5, "us per Gflop", 1.2),
        log("fullest_gflop_us", 3e4 / bf16_tflops, "us per Gflop of one expert", 1.5),
        log("l2_over_dram", 2.5, "1", 0.4),
    )


@dataclass(frozen=True, eq=False)
class MoeKernel:
    """A kernel's fitted constants on one GPU, shared by all its routings and sizes."""

    constants: tuple[Constant, ...]
    fit: Fit
    l2_bytes: float
    #: relative residual of cold rows in the fit
    residual_sd: float

    @classmethod
    def fitted(
        cls, rows: Sequence[MoeRow], *, l2_bytes: float, dram_gb_per_s: float, bf16_tflops: float
    ) -> "MoeKernel":
        """Joint robust fit of all rows; cache-hot rows tell the L2 rate and the fixed time."""
        priors = kernel_priors(dram_gb_per_s, bf16_tflops)
        work = MoeWork.of(rows, l2_bytes)
        sd = np.where(work.cold, _ROW_SD, _HOT_SD)
        prior_x = np.array([np.log(p.value) for p in priors])
        # a floor below every row has no gradient, so the fit also starts from a high one
        high = prior_x + np.where([p.name == "floor_us" for p in priors], 1.5, 0.0)
        fits = [
            robust_map(
                lambda x: layer_us(work, as_mapping(priors, x), in_step=False),
                np.array([row.time_us for row in rows]),
                sd,
                prior_x,
                np.diag([p.prior_sd**-2.0 for p in priors]),
                start_K=start,
            )
            for start in (prior_x, high)
        ]
        fit = min(fits, key=lambda f: f.cost)
        cold = fit.residuals[work.cold]
        total = 4 * 0.05**2 + float(np.sum(np.minimum(cold, 0.3) ** 2))
        return cls(priors, fit, l2_bytes, float(np.sqrt(total / (4 + cold.size))))

    def constants_by_name(self) -> dict[str, float]:
        """Fitted values in their units."""
        return {p.name: float(np.exp(x)) for p, x in zip(self.constants, self.fit.x, strict=True)}

    def predict_us(self, rows: Sequence[MoeRow], *, in_step: bool) -> Array:
        """5 %, 50 % and 95 % quantiles, [3, N]."""
        work = MoeWork.of(rows, self.l2_bytes)
        num = self.fit.x.size
        delta = 1e-4
        probes = np.concatenate([np.zeros((1, num)), delta * np.eye(num)])
        values = layer_us(work, as_mapping(self.constants, self.fit.x + probes), in_step=in_step)
        gradient = (np.log(values[1:]) - np.log(values[0])) / delta
        variance = np.einsum("kn,kj,jn->n", gradient, self.fit.covariance, gradient)
        share = resident_share(work.cache_ratio) * (not in_step)
        base = np.where(share > 0, _HOT_SD, self.residual_sd)
        # part of the bytes resident: how much is a guess between all and none
        cold = layer_us(work, as_mapping(self.constants, self.fit.x[None]), in_step=True)[0]
        guess = np.log(cold / values[0]) * np.sqrt(np.minimum(share, 1.0 - share))
        sd = np.sqrt(variance + base**2 + guess**2)
        log_median = np.log(values[0])
        result: Array = np.exp(log_median + np.array([[-Z90], [0.0], [Z90]]) * sd)
        return result
