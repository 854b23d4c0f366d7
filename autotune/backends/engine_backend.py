"""Measures on the real tensor-parallel engine; the only file of ``autotune`` that imports it.

A group is what new workers are needed for (tensor-parallel size, collectives, NCCL, placement,
graphs); speculation changes from call to call. Output is checked against plain decoding of the
same prompts, which the backend generates once when the study has not measured it yet.
"""

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from autotune.backends.base import (
    UNPLACED,
    BackendContext,
    BackendFailure,
    Group,
    failed_measurement,
    over_memory,
    require_open,
    tail,
)
from autotune.backends.effective import nccl_log_environment, nccl_summary
from autotune.backends.engine_args import (
    base_knobs,
    group_mapping,
    logs_tuning,
    prompts_per_level,
    resolve,
    study_prompts,
)
from autotune.backends.engine_baselines import Baselines, Prompts
from autotune.backends.engine_health import RecentHealth
from autotune.backends.engine_measurement import measured
from autotune.backends.engine_proof import Proof, allreduce_sizes, nccl_carries, prove
from autotune.backends.output_check import Checked, Reference
from autotune.errors import UserError
from autotune.health import snapshot, unhealthy
from autotune.health_watch import HealthWatch, explained
from autotune.launch import RESTART_KNOBS, speculation_mapping
from autotune.nccl_log import parse_nccl_logs
from autotune.provenance import collect_provenance
from autotune.records import Failure, Health, Measurement, Provenance
from engine.api import Engine
from engine.config import LaunchConfig, SpeculationConfig
from engine.errors import EngineError
from engine.host import machine_fingerprint
from engine.results import Request, RunResult
from model.spec import Knobs, Scalar, Workload

_GRAPHS = ("cuda_graph.draft", "cuda_graph.verify", "cuda_graph.extend")
#: failures after which the workers are gone
_FATAL = ("oom", "crash", "hang")


class EngineBackend:
    """Our engine as a backend."""

    name = "engine"

    def __init__(self, context: BackendContext) -> None:
        """Raises ``UserError`` for arguments, devices or sizes that this host cannot give."""
        self._study = context.study
        self._log_dir = context.log_dir
        self._settings = resolve(context)
        self._group: Group | None = None
        self._engine: Engine | None = None
        self._config: LaunchConfig | None = None
        self._proof = Proof()
        self._warm: set[tuple[str, int]] = set()
        self._baselines = Baselines(exact=self._settings.dtype == "float32")
        self._prompts_of: dict[int, Prompts] = {}
        self._num_starts = 0
        self._health = RecentHealth(lambda: snapshot(self._settings.device))

    def share(self, other: "EngineBackend") -> None:
        """Use what ``other``, which measures the same study, knows: plain output, device health."""
        self._baselines = other._baselines
        self._health = other._health

    def warm(self, knobs: Knobs, workload: Workload) -> None:
        """Compile and capture what a repeat needs, measuring nothing.

        Raises ``BackendFailure`` when the workers fail.
        """
        require_open(self, self._group, knobs)
        try:
            self._warm_up(self._running(), knobs, workload, self._prompts(workload))
        except EngineError as error:
            if error.kind in _FATAL:
                self._drop()
            raise BackendFailure(_failure(error, "warmup")) from error

    def group(self, knobs: Knobs) -> Group:
        """Settings that need new workers.

        Plain decoding never runs the draft, verify and extend graphs, so it shares the start of
        the speculative knobs that the study lists rather than asking for one of its own.
        """
        values = knobs.values()
        settings = {name: values[name] for name in RESTART_KNOBS}
        if knobs.method == "off":
            for name in _GRAPHS:
                listed = self._study.space.get(name, ())
                decode = settings["cuda_graph.decode"]
                settings[name] = decode if decode in listed else bool(listed and listed[0])
        return Group.of(settings)

    def open(self, group: Group) -> None:
        """Start workers with the group's settings and prove that these took effect."""
        self.close()
        self._group = group
        try:
            self._start(group)
        except BaseException:
            self._group = None
            raise

    def measure(self, knobs: Knobs, workload: Workload, repeat: int) -> Measurement:
        """One repeat: warm up once per knobs and level, generate, check the output."""
        require_open(self, self._group, knobs)
        started = datetime.now(UTC)
        stage = "start"
        before: tuple[Health, ...] = ()
        watch = self._watch()
        try:
            with watch:
                engine = self._running()
                stage = "warmup"
                prompts = self._prompts(workload)
                self._warm_up(engine, knobs, workload, prompts)
                plain = partial(self._plain, engine, workload)
                self._baselines.prepare(knobs, workload, prompts, plain)
                before = self._health.recent()
                stage = "measure"
                started = datetime.now(UTC)
                result = self._generate(engine, knobs, workload, prompts)
                ended = datetime.now(UTC)
                after = self._health.now()
                stage = "check"
                outputs = tuple(request.token_ids for request in result.requests)
                checked = self._baselines.check(knobs, workload, outputs, prompts, plain)
        except EngineError as error:
            failed = _stopped(error, stage, watch)
            return self._failed(knobs, workload, repeat, failed, started, before)
        except BackendFailure as error:
            return self._failed(knobs, workload, repeat, error, started, before)
        values = measured(result, knobs)
        return Measurement(
            trial=UNPLACED,
            knobs_id=knobs.id,
            concurrency=workload.concurrency,
            repeat=repeat,
            order=UNPLACED,
            started=started,
            ended=ended,
            output_check=checked.verdict,
            notes=(f"output: {checked.reason}",),
            health_before=before,
            health_after=after,
            failure=self._problem(checked, unhealthy(before, after), values["memory_gib"]),
            **values,
        )

    def provenance(self) -> Provenance:
        """Launch config, environment of every worker, code and host."""
        config: dict[str, Any] = {"backend": self.name, "engine": None}
        if self._config is not None:
            config["engine"] = self._config.model_dump(mode="json")
        return collect_provenance(
            config,
            device=self._settings.device,
            ranks=self._proof.ranks,
            machine_fingerprint=machine_fingerprint(),
            nccl=self.nccl(),
        )

    def nccl(self) -> dict[str, object]:
        """What NCCL's log says it chose, in graphs captured since the start too; empty without."""
        if not self._proof.nccl:
            return {}
        return nccl_summary(parse_nccl_logs(self._nccl_logs()))

    def close(self) -> None:
        """Stop the workers; safe to call at any time."""
        engine, self._engine, self._group = self._engine, None, None
        self._warm.clear()
        if engine is not None:
            # what a dying worker says on the way out belongs to its own measurement
            with contextlib.suppress(EngineError):
                engine.close()

    # -- starting ------------------------------------------------------------------------------

    def _running(self) -> Engine:
        """The engine; started again when the last repeat lost its workers."""
        if self._engine is None:
            assert self._group is not None
            self._start(self._group)
        assert self._engine is not None
        return self._engine

    def _start(self, group: Group) -> None:
        settings = dict(group.settings)
        self._num_starts += 1
        self._proof = Proof()
        resolved = self._settings
        mapping = group_mapping(self._study, resolved, settings)
        if resolved.device == "cuda":
            self._log_dir.mkdir(parents=True, exist_ok=True)
            mapping["environment"] = nccl_log_environment(
                self._log_dir / f"nccl.{self._num_starts}", logs_tuning(resolved.args, settings)
            )
        config = LaunchConfig.model_validate(mapping)
        watch = self._watch()
        try:
            with watch:
                engine = Engine(config, log_dir=self._log_dir / f"start{self._num_starts}")
        except EngineError as error:
            if error.kind == "invalid" and self._config is None:
                # nothing ever started: what the study asks for cannot work at all
                raise UserError(f"engine: {error.message}") from error
            raise _stopped(error, "start", watch) from error
        self._engine, self._config = engine, config
        try:
            with watch:
                self._prove(engine, settings)
        except (EngineError, BackendFailure) as error:
            self._drop()
            if isinstance(error, BackendFailure):
                raise
            raise _stopped(error, "start", watch) from error

    def _prove(self, engine: Engine, settings: dict[str, Scalar | None]) -> None:
        """Read back what the workers have; raise ``setting_not_effective`` on a difference."""
        base, logs = base_knobs(settings), None
        sizes: tuple[int, ...] = ()
        if nccl_carries(self._settings.device, base):
            from engine.resident import bucket

            element_bytes = 4 if self._settings.dtype == "float32" else 2
            hidden = engine.shapes.target.hidden
            sizes = allreduce_sizes(self._study, hidden, element_bytes, bucket)
            logs = self._nccl_logs
        self._proof = prove(engine, base, logs=logs, sizes_bytes=sizes)

    def _nccl_logs(self) -> list[Path]:
        return sorted(self._log_dir.glob(f"nccl.{self._num_starts}.*.log"))

    def _drop(self) -> None:
        """Stop the workers but keep the group open: the next repeat starts them again."""
        group = self._group
        self.close()
        self._group = group

    # -- measuring -----------------------------------------------------------------------------

    def _prompts(self, workload: Workload) -> Prompts:
        """Prompts of a level, read once: cutting them takes longer than a short repeat."""
        level = workload.concurrency
        if level not in self._prompts_of:
            count = prompts_per_level(self._study, level)
            self._prompts_of[level] = study_prompts(self._study, count).token_ids
        return self._prompts_of[level]

    def _warm_up(self, engine: Engine, knobs: Knobs, workload: Workload, prompts: Prompts) -> None:
        key = (knobs.id, workload.concurrency)
        if key in self._warm:
            return
        for _ in range(self._study.measure.warmup):
            few = prompts[: workload.concurrency]
            self._generate(engine, knobs, workload, few, self._settings.args.warmup_tokens)
        self._warm.add(key)

    def _plain(
        self,
        engine: Engine,
        workload: Workload,
        prompts: Prompts,
        batch_size: int,
        margins: bool,
        max_tokens: int | None = None,
    ) -> Reference:
        """Plain decoding of ``prompts``, ``batch_size`` at a time."""
        result = engine.generate(
            self._requests(workload, prompts, max_tokens),
            SpeculationConfig(),
            concurrency=batch_size,
            margins=margins,
        )
        return Reference(
            tuple(request.token_ids for request in result.requests),
            tuple(request.margins for request in result.requests) if margins else None,
            tuple(request.runners_up for request in result.requests) if margins else None,
        )

    def _generate(
        self, engine: Engine, knobs: Knobs, workload: Workload, prompts: Prompts,
        max_tokens: int | None = None,
    ) -> RunResult:  # fmt: skip
        """Run ``prompts``, as many at a time as the level has slots."""
        return engine.generate(
            self._requests(workload, prompts, max_tokens),
            SpeculationConfig.model_validate(speculation_mapping(knobs)),
            concurrency=workload.concurrency,
        )

    def _requests(
        self, workload: Workload, prompts: Prompts, max_tokens: int | None = None
    ) -> list[Request]:
        return [
            Request(
                prompt_ids=ids,
                max_new_tokens=min(workload.output_len, max_tokens or workload.output_len),
                temperature=workload.temperature,
                seed=self._settings.args.sampling_seed + workload.seed + index,
                ignore_eos=workload.ignore_eos,
            )
            for index, ids in enumerate(prompts)
        ]

    def _failed(
        self,
        knobs: Knobs,
        workload: Workload,
        repeat: int,
        failed: BackendFailure,
        started: datetime,
        before: tuple[Health, ...],
    ) -> Measurement:
        """A repeat without a number; after a hang the devices count as seen while it lasted."""
        failure = failed.failure
        if failure.kind in _FATAL:
            self._drop()
        hung = failure.kind == "hang" and failed.seen
        return failed_measurement(
            knobs,
            workload,
            repeat,
            failure,
            started=started,
            health_before=before,
            health_after=failed.seen if hung else self._health.now(),
        )

    def _watch(self) -> HealthWatch:
        """Reads the devices while workers may hang: once they are killed nothing shows any more."""
        device, timeout_s = self._settings.device, float(self._settings.args.timeout_s)
        # in a thread of its own: not the reading that repeats share
        return HealthWatch(lambda: snapshot(device), timeout_s)

    def _problem(
        self, checked: Checked, slowed: str | None, memory_gib: float | None
    ) -> Failure | None:
        """Why a repeat with numbers must not count, or None."""
        if checked.verdict == "incorrect" and self._study.constraints.lossless:
            return Failure(kind="incorrect", stage="check", message=checked.reason)
        heavy = over_memory(memory_gib, self._study.constraints.max_memory_gib)
        if heavy is not None:
            return heavy
        if slowed is not None:
            message = f"a device slowed itself down: {slowed}; cool or power it and resume"
            return Failure(kind="unhealthy_host", stage="measure", message=message)
        return None


def _failure(error: EngineError, stage: str) -> Failure:
    return Failure(
        kind=error.kind, stage=stage, message=error.message, log_tail=tail(error.log_tail)
    )


def _stopped(error: EngineError, stage: str, watch: HealthWatch) -> BackendFailure:
    """The failure with what the devices did until it was noticed."""
    seen = watch.before(error.noticed_s)
    return BackendFailure(explained(_failure(error, stage), seen), seen)


def host_fingerprint() -> str:
    """What the engine calls this host: machine files, provenance and best configs carry it."""
    return machine_fingerprint()


def bench_allreduce(
    config: Mapping[str, Any], sizes_bytes: Sequence[int], repeats: int
) -> tuple[dict[int, tuple[float, ...]], str | None]:
    """All-reduces on workers of a launch ``config``: size -> each repeat's us; NCCL's version.

    Raises ``BackendFailure`` when the workers do not start, die or hang.
    """
    try:
        with Engine(LaunchConfig.model_validate(config)) as engine:
            times = engine.allreduce_bench(sizes_bytes, repeats)
            version = engine.environment()[0].nccl_version
    except EngineError as error:
        raise BackendFailure(_failure(error, "bench")) from error
    return {row.size_bytes: row.times_us for row in times}, version
