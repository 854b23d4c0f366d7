"""The engine as its callers see it: start ranks, generate, measure, end them.

``with Engine(config) as engine: engine.generate([Request(...)])``. Importing this module imports no
torch; all computing happens in the workers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.build import Shapes, resolve
from engine.config import SCRATCH_ROWS, LaunchConfig, SpeculationConfig
from engine.errors import invalid
from engine.messages import AllreduceBench, Environment, Generate
from engine.results import AllreduceTime, Request, RunResult, WorkerEnvironment
from engine.shapes import TargetShape
from engine.supervisor import Supervisor


class Engine:
    """A started engine: one worker process a rank, models loaded.

    Raises ``EngineError``: "invalid" for a mistake in the config, the checkpoint or a request
    (after the latter the engine stays usable); "oom", "crash" or "hang" end the workers. A worker
    never outlives its parent, and ``close`` leaves no process, port, file or memory behind.
    """

    def __init__(self, config: LaunchConfig, *, log_dir: Path | None = None) -> None:
        self.config = config
        self.shapes = resolve(config)
        self._supervisor = Supervisor(config, log_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Worker process ids by rank; empty once closed."""
        return self._supervisor.pids

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of this engine's figures must know of its weights, one line each."""
        target, notes = self.shapes.target, []
        if target.layers != target.whole_layers:
            notes.append(f"a slice: {target.layers} of {target.whole_layers} layers")
        if self.config.target.weights == "random":
            notes.append("target weights are random: its text means nothing")
        if self.config.draft is not None and self.config.draft.weights == "random":
            notes.append("draft weights are random: acceptance means nothing unless synthetic")
        return tuple(notes)

    def generate(
        self,
        requests: Sequence[Request],
        speculation: SpeculationConfig | None = None,
        *,
        concurrency: int | None = None,
        margins: bool = False,
        timed: bool = True,
    ) -> RunResult:
        """Run ``requests``, at most ``concurrency`` at once (default: what the config allows).

        ``speculation`` None takes the config's schedule for this concurrency; it may differ from
        call to call without a restart. ``margins`` (plain decoding only) records each token's lead
        over the second best. ``timed`` False takes no phase times on a GPU. Raises ``EngineError``.
        """
        limit = self.config.max_concurrency
        if concurrency is not None and not 1 <= concurrency <= limit:
            raise invalid(
                f"concurrency {concurrency} must be between 1 and max_concurrency {limit}",
                "generate",
            )
        at_once = min(concurrency or limit, max(len(requests), 1))
        chosen = speculation or self.config.speculation_at(at_once)
        check_requests(self.config, self.shapes, requests, chosen, margins=margins)
        message = Generate(tuple(requests), chosen.model_dump_json(), at_once, margins, timed)
        result, *others = self._supervisor.command(message, "generate")
        assert isinstance(result, RunResult)
        peaks = [p for p in (result.peak_memory_bytes, *others) if isinstance(p, int)]
        return replace(result, peak_memory_bytes=max(peaks, default=None))

    def environment(self) -> tuple[WorkerEnvironment, ...]:
        """Every worker's environment as C ``getenv`` sees it there, by rank."""
        found = self._supervisor.command(Environment(), "generate")
        return tuple(w for w in found if isinstance(w, WorkerEnvironment))

    def allreduce_bench(
        self, sizes_bytes: Sequence[int], repeats: int = 50
    ) -> tuple[AllreduceTime, ...]:
        """Time all-reduces of the config's dtype on the engine's own group, as rank 0 sees them."""
        if repeats < 1 or any(size < 1 for size in sizes_bytes):
            raise invalid("allreduce_bench: sizes and repeats must be at least 1", "bench")
        message = AllreduceBench(tuple(sizes_bytes), repeats)
        times = self._supervisor.command(message, "bench")[0]
        assert isinstance(times, tuple)
        return times

    def close(self) -> None:
        """End the workers; may be called twice."""
        self._supervisor.close()


def check_requests(
    config: LaunchConfig,
    shapes: Shapes,
    requests: Sequence[Request],
    speculation: SpeculationConfig,
    *,
    margins: bool = False,
) -> None:
    """Raise ``EngineError`` (invalid) for what a started engine would refuse; starts nothing."""
    if speculation.method != "off":
        draft = shapes.draft
        if draft is None:
            raise invalid("speculation asked for, but the config has no draft", "generate")
        if speculation.topk > draft.draft_vocab:
            raise invalid(
                f"topk {speculation.topk} is above the draft's vocabulary of {draft.draft_vocab}",
                "generate",
            )
        if margins:
            raise invalid("margins are recorded by plain decoding only", "generate")
    for index, request in enumerate(requests):
        _check_request(config, shapes.target, index, request)


def _check_request(config: LaunchConfig, target: TargetShape, index: int, request: Request) -> None:
    length, new, limit = len(request.prompt_ids), request.max_new_tokens, config.max_context
    if length < 1 or new < 1:
        raise invalid(
            f"request {index}: {length} prompt tokens and {new} new tokens; both must be at "
            "least 1",
            "generate",
        )
    if length + new > limit:
        raise invalid(
            f"request {index}: {length} prompt tokens + {new} new tokens are above max_context "
            f"{limit} (the model allows {target.max_position})",
            "generate",
        )
    wrong = next((t for t in request.prompt_ids if not 0 <= t < target.vocab), None)
    if wrong is not None:
        raise invalid(
            f"request {index}: token {wrong} is outside the vocabulary of {target.vocab}",
            "generate",
        )
    if request.seed < 0:
        raise invalid(f"request {index}: seed {request.seed} must be 0 or more", "generate")
    if not 0 <= request.temperature < float("inf"):
        raise invalid(
            f"request {index}: temperature {request.temperature} must be 0 or more, and finite",
            "generate",
        )


#: what a slot holds beyond ``max_context``; re-exported for memory estimates
SLOT_SCRATCH_ROWS = SCRATCH_ROWS
