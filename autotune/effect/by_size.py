"""What a change of NCCL settings does to an all-reduce, size by size, predicted.

NCCL's choice comes from the selector, the time from the all-reduce model with its constants drawn
from their priors (the same draws for both sides, so that only the change counts). Where both
sides run the same kernel in the same way the change is inert, whatever the model says of times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from autotune.effect.rewired import rewired
from model.machine import Machine
from model.nccl.communicator import final_channels, p2p_rule
from model.nccl.selector import Choice, Selector
from model.nccl.settings import NcclSettings
from model.nccl.tuning import Communicator

Outcome = Literal["inert", "helps", "harms", "unclear", "fails"]
#: ratios nearer to 1 than this are of no use to anybody
NEGLIGIBLE = 0.02
#: sizes judged where nobody names any: 1 token of a small model to 64 of a large one, and prefill
DEFAULT_SIZES = (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576, 4194304)
#: NCCL's default NCCL_BUFFSIZE
_BUFFSIZE = 4 << 20
_DRAWS = 64
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEffect:
    """One size: what runs with and without the change, and what it costs.

    ``ratio`` is time with over time without (median, 5 %, 95 %); None without a machine.
    """

    size_bytes: int
    outcome: Outcome
    present: str
    without: str
    present_us: float | None = None
    without_us: float | None = None
    ratio: tuple[float, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        ratio = self.ratio
        return {
            "bytes": self.size_bytes,
            "outcome": self.outcome,
            "with": self.present,
            "without": self.without,
            "with_us": self.present_us,
            "without_us": self.without_us,
            "time_ratio": None if ratio is None else list(ratio),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where an all-reduce runs: a communicator as logged or searched, and a machine for times.

    ``machine`` must search the same communicator (see ``autotune.effect.scene``), else None.
    """

    comm: Communicator
    machine: Machine | None
    #: topology as the log prints it
    topology: tuple[str, ...] = ()

    def selector(self, settings: NcclSettings) -> Selector:
        """NCCL's choices under other settings of the same communicator.

        Raises ``ValueError`` when the settings leave NCCL nothing to run, and when they change the
        transport and neither a machine nor the log's topology tells to what.
        """
        if self.machine is not None:
            from model.allreduce.model import nccl_setup

            version = self.comm.release.name
            return nccl_setup(self.machine, self.comm.num_ranks, settings, version).selector
        comm = self.comm
        if p2p_rule(settings) != p2p_rule(comm.settings):
            other = rewired(comm, self.topology, settings)
            if other is not None:
                return Selector(other)
        channels = final_channels(
            comm.release, comm.ring, comm.tree, settings,
            num_nodes=comm.num_nodes, min_cc=comm.min_cc, nvls_channels=comm.nvls_channels,
        )  # fmt: skip
        return Selector(replace(comm, settings=settings, num_channels=channels))

    def compare(
        self, settings: NcclSettings, other: NcclSettings, sizes: Sequence[int]
    ) -> tuple[SizeEffect, ...]:
        """What ``settings`` do against ``other``, by size in bytes."""
        ours, theirs = self.selector(settings), self.selector(other)
        pairs = [(_choice(ours, size), _choice(theirs, size)) for size in sizes]
        # the same kernel over another transport is not the same
        moved = ours.comm.transport != theirs.comm.transport
        same = [not moved and _same(a, b, settings, other) for a, b in pairs]
        runnable = [
            size for size, (a, b) in zip(sizes, pairs, strict=True)
            if isinstance(a, Choice) and isinstance(b, Choice)
        ]  # fmt: skip
        times = self._ratios(settings, other, runnable)
        return tuple(
            _effect(
                size,
                (_shown(a, ours if moved else None), _shown(b, theirs if moved else None)),
                isinstance(a, str) and not isinstance(b, str),
                equal,
                times.get(size),
            )
            for size, (a, b), equal in zip(sizes, pairs, same, strict=True)
        )

    def _ratios(
        self, settings: NcclSettings, other: NcclSettings, sizes: Sequence[int]
    ) -> dict[int, tuple[float, float, tuple[float, float, float]]]:
        """Size -> time with, time without (prior constants, us), quantiles of the ratio."""
        if self.machine is None or not sizes:
            return {}
        import numpy as np

        ours, theirs = (
            _times_us(self.machine, self.comm.num_ranks, s, self.comm.release.name, sizes)
            for s in (settings, other)
        )
        ratio = np.quantile(ours[1:] / theirs[1:], [0.5, 0.05, 0.95], axis=0)
        return {
            size: (
                float(ours[0, i]),
                float(theirs[0, i]),
                (float(ratio[0, i]), float(ratio[1, i]), float(ratio[2, i])),
            )
            for i, size in enumerate(sizes)
        }


def _times_us(
    machine: Machine, num_ranks: int, settings: NcclSettings, version: str, sizes: Sequence[int]
) -> Any:
    """[1 + draws, sizes] times in a graph, us; the first at the prior's constants."""
    from model.allreduce.analytic import time_us
    from model.allreduce.model import allreduce_design

    design = allreduce_design(machine, num_ranks, "nccl", settings, version, sizes)
    return time_us(design, _drawn_constants())


@cache
def _drawn_constants() -> dict[str, Any]:
    """Constants [1 + draws, 1]: the priors, then draws from them, the same ones in every call.

    The priors come first since the predictor evaluates there: both then name the same time.
    """
    import numpy as np

    from model.allreduce.model import constants

    rng = np.random.default_rng(_SEED)

    def drawn() -> Any:
        return np.concatenate([np.zeros((1, 1)), rng.standard_normal((_DRAWS, 1))])

    return {spec.name: spec.prior * np.exp(spec.prior_log_sd * drawn()) for spec in constants()}


def _choice(selector: Selector, size: int) -> Choice | str:
    try:
        return selector.choose(size)
    except ValueError as error:
        return str(error)


def _same(a: Choice | str, b: Choice | str, ours: NcclSettings, other: NcclSettings) -> bool:
    """Whether both run the same kernel in the same way; NCCL's own clock does not matter."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    if (a.algo, a.proto, a.channels, a.threads) != (b.algo, b.proto, b.channels, b.threads):
        return False
    # the buffer size reaches the Simple protocol only
    if a.proto != "Simple":
        return True
    ours_bytes, other_bytes = (
        _BUFFSIZE if s.buffsize_bytes is None else s.buffsize_bytes for s in (ours, other)
    )
    return ours_bytes == other_bytes


def _effect(
    size: int,
    shown: tuple[str, str],
    fails: bool,
    same: bool,
    times: tuple[float, float, tuple[float, float, float]] | None,
) -> SizeEffect:
    outcome: Outcome = "inert" if same else "fails" if fails else "unclear"
    if times is None:
        return SizeEffect(size_bytes=size, outcome=outcome, present=shown[0], without=shown[1])
    present_us, without_us, ratio = times
    if not same:
        median, low, high = ratio
        if low > 1.0 and median > 1.0 + NEGLIGIBLE:
            outcome = "harms"
        elif high < 1.0 and median < 1.0 - NEGLIGIBLE:
            outcome = "helps"
    median, low, high = (1.0, 1.0, 1.0) if same else ratio
    return SizeEffect(
        size_bytes=size,
        outcome=outcome,
        present=shown[0],
        without=shown[1],
        present_us=round(present_us, 2),
        without_us=round(without_us, 2),
        ratio=(round(median, 3), round(low, 3), round(high, 3)),
    )


def _shown(choice: Choice | str, moved: Selector | None) -> str:
    if isinstance(choice, str):
        return choice
    via = "" if moved is None else f" via {moved.comm.transport}"
    plural = "" if choice.channels == 1 else "s"
    return (
        f"{choice.algo.capitalize()}/{choice.proto}, {choice.channels} channel{plural} x "
        f"{choice.threads} threads{via}"
    )
