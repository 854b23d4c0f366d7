"""A simulated host: hidden constants, missing terms, noise, drift and failures; no hardware.

For trying search designs and testing the loop. Equal seeds and equal calls give equal results to
the last bit; time is simulated (or really waited for, scaled by ``clock``).
"""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field, StrictInt, ValidationError

from autotune.backends.base import (
    UNPLACED,
    BackendContext,
    BackendFailure,
    Group,
    argument_problems,
    failed_measurement,
    require_open,
)
from autotune.backends.sim_acceptance import AcceptanceDraws, Tree, count_acceptance, draft_tree
from autotune.backends.sim_noise import Drift, HostSpeed, outlier_factor, stream
from autotune.backends.sim_truth import Truth, TruthArgs
from autotune.errors import UserError
from autotune.launch import RESTART_KNOBS, nccl_environment
from autotune.provenance import collect_provenance
from autotune.records import Failure, Health, Measurement, PromptSample, Provenance
from autotune.schemas import Positive, Schema
from model.spec import Knobs, Workload

Share = Annotated[float, Field(ge=0, le=1)]

#: the simulated clock starts here
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


class FailureRates(Schema):
    """Chances of failures. The first three belong to the knobs, the others strike any time."""

    oom: Share = 0.0
    setting_not_effective: Share = 0.0
    incorrect: Share = 0.0
    crash: Share = 0.0
    hang: Share = 0.0
    start_crash: Share = 0.0


class SimArgs(Schema):
    """``backend.args`` of ``sim``; sizes as in the project's speculation notes, section 3."""

    #: None: the study's seed
    seed: Annotated[StrictInt, Field(ge=0)] | None = None
    #: "virtual" waits for nothing; a number really waits that many seconds per simulated second
    clock: Literal["virtual"] | Positive = "virtual"
    truth: TruthArgs = TruthArgs()
    noise_cv: Share = 0.015
    drift_sd: Share = 0.006
    drift_time_s: Positive = 300.0
    outlier_rate: Share = 0.02
    outlier_size: Share = 0.10
    slow_host_share: Share = 0.15
    slow_host_factor: Annotated[float, Field(ge=1)] = 1.4
    slow_host_dwell_s: Positive = 240.0
    failures: FailureRates = FailureRates()
    start_s: Positive = 90.0
    hang_timeout_s: Positive = 120.0


class SimBackend:
    """The simulated host as a backend."""

    name = "sim"

    def __init__(self, context: BackendContext) -> None:
        """Raises ``UserError`` for unknown arguments, or without a model of the target."""
        if context.predictor is None:
            raise UserError(
                "backend.kind: sim needs a performance model; give the study a target with a "
                "config.json and a machine file"
            )
        try:
            self._args = SimArgs.model_validate(context.study.backend.args)
        except ValidationError as error:
            raise argument_problems(error, SimArgs) from None
        self._seed = context.study.seed if self._args.seed is None else self._args.seed
        self._study = context.study
        self._machine = context.machine
        self._truth = Truth(context.predictor, self._seed, self._args.truth)
        self._drift = Drift(self._seed, self._args.drift_sd, float(self._args.drift_time_s))
        self._host = HostSpeed(
            self._seed,
            self._args.slow_host_share,
            self._args.slow_host_factor,
            float(self._args.slow_host_dwell_s),
        )
        self._now_s = 0.0
        self._num_starts = 0
        self._group: Group | None = None

    def group(self, knobs: Knobs) -> Group:
        """What a real engine would restart for; plain decoding shares its neighbours' start."""
        values = knobs.values()
        graphs = ("cuda_graph.draft", "cuda_graph.verify", "cuda_graph.extend")
        return Group.of({name: values[name] for name in RESTART_KNOBS if name not in graphs})

    def open(self, group: Group) -> None:
        """Simulate a start; it takes ``start_s`` and may crash."""
        self.close()
        self._num_starts += 1
        draws = stream(self._seed, "start", group.id, self._num_starts)
        self._pass(float(self._args.start_s) * float(draws.lognormal(0.0, 0.1)))
        if draws.random() < self._args.failures.start_crash:
            failure = Failure(
                kind="crash", stage="start", message="simulated crash of a worker at start"
            )
            raise BackendFailure(failure)
        self._group = group

    def measure(self, knobs: Knobs, workload: Workload, repeat: int) -> Measurement:
        """Draw one repeat."""
        require_open(self, self._group, knobs)
        started = self._time()
        before = self._health(0.0)
        draws = stream(self._seed, "repeat", knobs.id, workload.concurrency, repeat)
        failure, lasted_s = self._struck(knobs, workload, draws.random(2).tolist())
        if failure is not None:
            self._pass(lasted_s)
            return failed_measurement(
                knobs,
                workload,
                repeat,
                failure,
                started=started,
                ended=self._time(),
                health_before=before,
                health_after=self._health(lasted_s),
            )
        cycles, tree, requests, samples = self._decode(knobs, workload, repeat)
        factor = self._drift.factor(self._now_s) * outlier_factor(
            draws, self._args.outlier_rate, self._args.outlier_size
        )
        factor *= float(draws.lognormal(0.0, self._args.noise_cv))
        slow = self._host.factor(self._now_s)
        total_ms: dict[str, float] = {}
        for active, count in sorted(cycles.items()):
            true = self._truth.cycle(knobs, replace(workload, concurrency=active))
            for name, value in true.terms_ms.items():
                speed = slow if name in true.host_launched else 1.0
                total_ms[name] = total_ms.get(name, 0.0) + value * count * factor * speed
        for name in total_ms:
            # single terms scatter on top of what all share
            total_ms[name] *= float(draws.lognormal(0.0, self._args.noise_cv))
        num_cycles = sum(cycles.values())
        terms_ms = {name: value / num_cycles for name, value in total_ms.items()}
        wall_s = sum(total_ms.values()) / 1e3
        ttft_ms = self._truth.ttft_ms(knobs, workload) * factor
        self._pass(wall_s + ttft_ms / 1e3)
        tokens = workload.concurrency * (workload.output_len - 1)
        acceptance = None
        if tree is not None:
            acceptance = count_acceptance(requests, tree, knobs.draft_tokens - 1)
        # plain decoding is what output is compared with
        incorrect = knobs.method != "off" and self._of_knobs(
            "incorrect", knobs, self._args.failures.incorrect
        )
        return Measurement(
            trial=UNPLACED,
            knobs_id=knobs.id,
            concurrency=workload.concurrency,
            repeat=repeat,
            order=UNPLACED,
            started=started,
            ended=self._time(),
            tokens_per_s=tokens / wall_s,
            ttft_ms=ttft_ms,
            tpot_ms=wall_s * 1e3 / (workload.output_len - 1),
            cycle_ms=sum(terms_ms.values()),
            terms_ms=terms_ms,
            accept_length=1.0
            if acceptance is None
            else 1.0 + acceptance.num_accepted / acceptance.num_verifies,
            acceptance=acceptance,
            prompts=tuple(
                PromptSample(
                    prompt_index=index,
                    output_tokens=workload.output_len,
                    # each request ends with its own last cycle
                    decode_s=wall_s * share,
                    ttft_ms=ttft_ms,
                    tokens_per_verify=verifies,
                )
                for index, (share, verifies) in enumerate(samples)
            ),
            output_check="incorrect" if incorrect else "exact",
            notes=("simulated: nothing was measured",),
            unknown={} if acceptance is not None else {"acceptance": "speculation is off"},
            health_before=before,
            health_after=self._health(wall_s),
            failure=Failure(
                kind="incorrect", stage="check", message="simulated: output differs from baseline"
            )
            if incorrect
            else None,
        )

    def provenance(self) -> Provenance:
        """The simulation's arguments; no worker and no hardware."""
        reason = "simulated: no worker runs"
        return collect_provenance(
            {"backend": self.name, "seed": self._seed, "args": self._args.model_dump(mode="json")},
            device="none",
            # no engine may take simulated numbers for those of its own host
            machine_fingerprint="" if self._machine is None else f"sim:{self._machine.fingerprint}",
            unknown={"ranks": reason, "health": reason},
        )

    def close(self) -> None:
        """Nothing runs."""
        self._group = None

    # -- drawing -------------------------------------------------------------------------------

    def _decode(
        self, knobs: Knobs, workload: Workload, repeat: int
    ) -> tuple[
        dict[int, int], Tree | None, list[AcceptanceDraws], list[tuple[float, tuple[int, ...]]]
    ]:
        """Cycles by number of running requests, and what each request did in them."""
        needed = workload.output_len - 1
        if knobs.method == "off":
            plain = [(1.0, ())] * workload.concurrency
            return {workload.concurrency: needed}, None, [], list(plain)
        tree = draft_tree(knobs, self._truth.acceptance)
        requests, verifies = [], []
        for index in range(workload.concurrency):
            # a request's difficulty is its prompt's: the same in every repeat and for all knobs
            shift = stream(self._seed, "prompt", workload.prompts_sha256, index).normal()
            draws = stream(self._seed, "accept", knobs.id, workload.concurrency, repeat, index)
            request = AcceptanceDraws(tree, self._truth.acceptance, float(shift), draws)
            emitted = 0
            made = []
            while emitted < needed:
                made.append(request.verify() + 1)
                emitted += made[-1]
            requests.append(request)
            verifies.append(tuple(made))
        longest = max(len(made) for made in verifies)
        cycles: dict[int, int] = {}
        for cycle in range(longest):
            active = sum(len(made) > cycle for made in verifies)
            cycles[active] = cycles.get(active, 0) + 1
        samples = [(len(made) / longest, made) for made in verifies]
        return cycles, tree, requests, samples

    def _struck(
        self, knobs: Knobs, workload: Workload, draws: list[float]
    ) -> tuple[Failure | None, float]:
        """A failure of this repeat and the seconds it takes, or (None, 0)."""
        rates = self._args.failures
        memory = self._truth.memory_problem(knobs, workload)
        if memory is None and self._of_knobs("oom", knobs, rates.oom):
            memory = "simulated out of memory"
        if memory is not None:
            return Failure(kind="oom", stage="warmup", message=memory), 5.0
        asked = nccl_environment(knobs)
        if asked and self._of_knobs("effect", knobs, rates.setting_not_effective):
            name, value = sorted(asked.items())[0]
            message = f"simulated: {name}={value} did not reach rank 1"
            return Failure(kind="setting_not_effective", stage="start", message=message), 1.0
        if draws[0] < rates.crash:
            message = "simulated crash: worker 1 ended with signal 11"
            return Failure(kind="crash", stage="measure", message=message), 3.0
        if draws[1] < rates.hang:
            limit = float(self._args.hang_timeout_s)
            message = f"simulated hang: no worker answered for {limit:g} s"
            return Failure(kind="hang", stage="measure", message=message), limit
        return None, 0.0

    def _of_knobs(self, what: str, knobs: Knobs, rate: float) -> bool:
        """Whether a property with this rate holds for the knobs; always the same answer."""
        return float(stream(self._seed, what, knobs.id).random()) < rate

    def _time(self) -> datetime:
        return EPOCH + timedelta(seconds=self._now_s)

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds
        if self._args.clock != "virtual":
            time.sleep(seconds * float(self._args.clock))

    def _health(self, busy_s: float) -> tuple[Health, ...]:
        """A clock that sinks and a temperature that rises with the simulated load."""
        slow = self._host.factor(self._now_s)
        warm = min(busy_s / 60.0, 1.0)
        return (
            Health(
                device="sim0",
                clock_mhz=round(1980.0 / self._drift.factor(self._now_s), 1),
                temperature_c=round(40.0 + 25.0 * warm, 1),
                load_average=8.0 if slow > 1.0 else 1.0,
            ),
        )
