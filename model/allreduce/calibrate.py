"""Fitting the all-reduce constants to measured rows, and predictions with honest intervals.

Rows are graphed (the GPU's time) or eager (the longer of GPU and host). The host's part is a
distribution: its spread is taken from the rows that the host bounds, by their quantiles, since a
busy host is bimodal and no formula fits it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from model.allreduce.analytic import time_us
from model.allreduce.constants import DIRECT_SPECS, EAGER_SPECS, GLOO_SPECS, NCCL_SPECS, PREFIX
from model.allreduce.design import PROTOCOLS, Design
from model.fit import ConstantSpec, FitResult, Predict, fit, log_jacobian
from model.normal import ndtr

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
#: what remains unexplained of one graphed row: repeatability and the form of the model
GRAPHED_LOG_SD = 0.042
#: what the channel law may be off per doubling of channels away from those measured: log sd of
#: the streaming part
CHANNEL_LAW_LOG_SD = 0.1
#: an eager row that the GPU bounds: eager calls overlap their launch, graphed ones their gaps
EAGER_GPU_LOG_SD = 0.055
#: an eager row of a busy host
EAGER_LOG_SD = 0.2
#: relative spread of host-bound calls before any was measured (5 to 95 %: about -28 to +39 %)
_HOST_LOG_SD = 0.2
#: a row is host-bound when the GPU needs less than this share of it
_HOST_BOUND = 0.8
_LEVELS = np.linspace(0.0, 1.0, 41)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Measured all-reduces: what they were, how long they took (us), graphed or eager."""

    design: Design
    time_us: Array
    graphed: Mask

    def __post_init__(self) -> None:
        if not (len(self.design) == len(self.time_us) == len(self.graphed)):
            raise ValueError("rows differ in number between design, time_us and graphed")
        bad = ~(np.isfinite(self.time_us) & (self.time_us > 0))
        if bad.any():
            raise ValueError(f"time_us {self.time_us[bad][0]} of a row must be > 0 us")

    @classmethod
    def concat(cls, parts: Sequence["Rows"]) -> "Rows":
        """All rows of ``parts``, in order."""
        return cls(
            design=Design.concat([part.design for part in parts]),
            time_us=np.concatenate([part.time_us for part in parts]),
            graphed=np.concatenate([part.graphed for part in parts]),
        )

    def take(self, mask: Mask) -> "Rows":
        """The rows where ``mask`` holds."""
        return Rows(
            design=self.design.take(mask), time_us=self.time_us[mask], graphed=self.graphed[mask]
        )

    def __len__(self) -> int:
        return len(self.time_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Median and 90 % interval of each row, us; ``log_sd`` of the GPU's part."""

    median_us: Array
    low_us: Array
    high_us: Array
    log_sd: Array

    def covers(self, time_us: Array) -> Mask:
        """Whether each measured time lies in its interval."""
        inside: Mask = (self.low_us <= time_us) & (time_us <= self.high_us)
        return inside


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceFit:
    """Posterior of the all-reduce constants on one host."""

    specs: tuple[ConstantSpec, ...]
    result: FitResult
    #: unexplained log sd of a graphed row, and of an eager row that the GPU bounds
    graphed_log_sd: float
    eager_log_sd: float
    #: log(host-bound eager time / call_us) at ``_LEVELS``
    host_log_quantiles: Array
    #: channel counts of the training rows that mostly stream, by protocol
    seen_channels: Mapping[str, tuple[float, ...]]

    def predict(self, design: Design, graphed: Mask) -> Predicted:
        """Medians and intervals of collectives."""
        log_us, jacobian = log_jacobian(_predictor(self.specs, design), self.result.theta, True)
        model_sd = self.result.log_sd(jacobian)
        noise = np.where(graphed, self.graphed_log_sd, self.eager_log_sd)
        streaming = _streaming(self.result.names, jacobian)
        law = CHANNEL_LAW_LOG_SD * self._doublings(design) * streaming
        sd = np.sqrt(model_sd**2 + noise**2 + law**2)
        z = 1.6448536
        quantiles = [np.exp(log_us + k * z * sd) for k in (-1, 0, 1)]
        if not graphed.all():
            call = np.log(self.result.constants[PREFIX + "call_us"])
            late = _slower_of(log_us, sd, call + self.host_log_quantiles)
            quantiles = [np.where(graphed, q, e) for q, e in zip(quantiles, late, strict=True)]
        low, median, high = quantiles
        return Predicted(median_us=median, low_us=low, high_us=high, log_sd=sd)

    def dominant(self, design: Design) -> list[tuple[str, float]]:
        """Constants by their share in the uncertainty of these rows, largest first, each with its
        identifiability (posterior sd / prior sd)."""
        _, jacobian = log_jacobian(_predictor(self.specs, design), self.result.theta, True)
        share = (jacobian**2).mean(axis=0) * np.diag(self.result.covariance)
        order = np.argsort(-share)
        return [(self.result.names[i], float(self.result.identifiability[i])) for i in order]

    def unidentifiable(self, design: Design) -> list[str]:
        """Constants that these rows depend on and that the data could not tell."""
        _, jacobian = log_jacobian(_predictor(self.specs, design), self.result.theta, True)
        matters = np.abs(jacobian).max(axis=0) > 0.05
        unknown = set(self.result.unidentifiable)
        found = [
            name
            for name, used in zip(self.result.names, matters, strict=True)
            if used and name in unknown
        ]
        far = self._doublings(design) > 0
        for proto in PROTOCOLS:
            rows = far & (getattr(design, proto.lower()) > 0)
            for channels in sorted(set(design.channels[rows].tolist())):
                found.append(f"channel law of {proto} at {channels:.0f} channel(s): no such row")
        return found

    def _doublings(self, design: Design) -> Array:
        """Doublings of the channel count between each row and the nearest measured one of its
        protocol, half as many between two measured ones, at most 2."""
        far = np.zeros(len(design))
        for proto in PROTOCOLS:
            rows = getattr(design, proto.lower()) > 0
            if proto not in self.seen_channels:
                far[rows] = 1.0
                continue
            seen = np.log2(self.seen_channels[proto])
            steps = np.log2(design.channels[rows])[:, None] - seen
            nearest = np.abs(steps).min(axis=1)
            between = (steps > 0).any(axis=1) & (steps < 0).any(axis=1)
            far[rows] = np.minimum(np.where(between, 0.5 * nearest, nearest), 2.0)
        return far


def specs_for(rows: Rows) -> tuple[ConstantSpec, ...]:
    """The constants that these rows can say something about."""
    design = rows.design
    chosen: tuple[ConstantSpec, ...] = ()
    direct = bool((design.one_shot + design.two_shot).any())
    if design.nccl.any() or direct:
        chosen += NCCL_SPECS
    if direct:
        chosen += DIRECT_SPECS
    if design.gloo.any():
        chosen += GLOO_SPECS
    return chosen + EAGER_SPECS


def fit_rows(
    rows: Rows,
    specs: Sequence[ConstantSpec] | None = None,
    prior_covariance: Array | None = None,
) -> AllreduceFit:
    """Fit the constants to measured rows; ``specs`` may carry an earlier posterior as prior."""
    if not len(rows):
        raise ValueError("no all-reduce rows to fit")
    chosen = specs_for(rows) if specs is None else tuple(specs)
    inside = _predictor(chosen, rows.design)
    call = [spec.name for spec in chosen].index(PREFIX + "call_us")
    graphed = rows.graphed

    def predict(theta: Array) -> Array:
        log_us = inside(theta)
        return np.where(graphed, log_us, np.maximum(log_us, np.log(theta[:, call, None])))

    sd = np.where(graphed, GRAPHED_LOG_SD, EAGER_LOG_SD)
    result = fit(
        chosen,
        predict,
        np.log(rows.time_us),
        sd,
        batched=True,
        prior_covariance=prior_covariance,
    )
    log_us, jacobian = log_jacobian(inside, result.theta, True)
    bound = np.exp(log_us) < _HOST_BOUND * rows.time_us
    log_call = float(np.log(result.theta[call]))
    host = np.log(rows.time_us[~graphed & bound]) - log_call
    busy = np.log(rows.time_us) - log_us
    scale = _robust_sd(result.residuals[graphed] / GRAPHED_LOG_SD)
    return AllreduceFit(
        specs=chosen,
        result=replace(result, noise_scale=max(scale, 1.0)),
        graphed_log_sd=GRAPHED_LOG_SD * max(scale, 1.0),
        eager_log_sd=max(_robust_sd(busy[~graphed & ~bound]), EAGER_GPU_LOG_SD),
        host_log_quantiles=_host_quantiles(host),
        seen_channels=_seen_channels(rows.design, result.names, jacobian),
    )


def prior_fit(specs: Sequence[ConstantSpec]) -> AllreduceFit:
    """The priors in the form of a fit: nothing was measured yet."""
    sd = np.array([spec.prior_log_sd for spec in specs])
    none = np.zeros(0)
    return AllreduceFit(
        specs=tuple(specs),
        result=FitResult(
            names=tuple(spec.name for spec in specs),
            theta=np.array([spec.prior for spec in specs]),
            covariance=np.diag(sd**2),
            identifiability=np.ones(len(specs)),
            residuals=none,
            weights=none,
            noise_scale=1.0,
            converged=True,
        ),
        graphed_log_sd=GRAPHED_LOG_SD,
        eager_log_sd=EAGER_GPU_LOG_SD,
        host_log_quantiles=_host_quantiles(none),
        seen_channels={},
    )


def _streaming(names: Sequence[str], jacobian: Array) -> Array:
    """Share of each time that the rates set, 0 to 1, from the log-log derivatives [N, C]."""
    rates = ("channel_", "link_", "socket_gb")
    at = [i for i, name in enumerate(names) if name.removeprefix(PREFIX).startswith(rates)]
    share: Array = np.clip(-jacobian[:, at].sum(axis=1), 0.0, 1.0)
    return share


def _seen_channels(
    design: Design, names: Sequence[str], jacobian: Array
) -> dict[str, tuple[float, ...]]:
    """Channel counts by protocol among rows whose time is mostly streaming."""
    mostly = _streaming(names, jacobian) > 0.5
    found = {}
    for proto in PROTOCOLS:
        channels = design.channels[mostly & (getattr(design, proto.lower()) > 0)]
        if len(channels):
            found[proto] = tuple(sorted(set(channels.tolist())))
    return found


def _predictor(specs: Sequence[ConstantSpec], design: Design) -> Predict:
    names = [spec.name for spec in specs]

    def log_time(theta: Array) -> Array:
        columns = {name: theta[:, i, None] for i, name in enumerate(names)}
        log_us: Array = np.log(time_us(design, columns))
        return np.broadcast_to(log_us, (len(theta), len(design)))

    return log_time


def _robust_sd(values: Array) -> float:
    """Standard deviation by the median absolute value (0 without values)."""
    return float(np.median(np.abs(values))) / 0.6745 if len(values) else 0.0


def _host_quantiles(log_ratio: Array) -> Array:
    """Quantiles of log(host-bound time / call) at ``_LEVELS``: measured, or judged if too few.

    The ends are widened by one spacing of the sorted sample: a new row may lie beyond all seen.
    """
    few = len(log_ratio) < 8
    sample = _HOST_LOG_SD * 1.2 * (2 * _LEVELS - 1) * 1.6 if few else np.sort(log_ratio)
    wide = (sample[-1] - sample[0]) / max(len(sample), 1) + 1e-3
    sample = np.concatenate([[sample[0] - wide], sample, [sample[-1] + wide]])
    quantiles: Array = np.quantile(sample, _LEVELS)
    return quantiles


def _slower_of(log_us: Array, sd: Array, host: Array) -> list[Array]:
    """5, 50 and 95 % quantiles (us) of max(GPU, host): GPU log-normal, host by its quantiles."""
    ends = [
        np.minimum(log_us - 4 * sd, host[0]),
        np.maximum(log_us + 4 * sd, host[-1]),
    ]
    grid = np.linspace(ends[0], ends[1], 400)
    gpu = ndtr((grid - log_us) / sd)
    both = gpu * np.interp(grid, host, _LEVELS, left=0.0, right=1.0)
    found = []
    for level in (0.05, 0.5, 0.95):
        at = np.argmax(both >= level, axis=0)
        found.append(np.exp(np.take_along_axis(grid, at[None], axis=0)[0]))
    return found
