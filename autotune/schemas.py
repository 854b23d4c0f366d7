"""The study file: what a user asks for. Strict, frozen, with one line per problem.

``load_study`` reads a YAML file into a ``Study`` whose paths are absolute (relative ones start at
the study file).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from autotune.knob_values import parse_dimension
from model.spec import Scalar

Metric = Literal["tokens_per_s", "ttft_ms", "tpot_ms"]
Count = Annotated[StrictInt, Field(ge=1)]
Number = StrictFloat
Positive = Annotated[Number, Field(gt=0)]
#: requests served at a time; far above what one host serves
Level = Annotated[StrictInt, Field(ge=1, le=16384)]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|m|min|s)(?=[\d\s]|$)\s*")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0}


def parse_duration_s(text: object) -> float:
    """Seconds of ``6h``, ``1h30m``, ``90s`` or ``2d``; a bare number has no unit and is refused."""
    if isinstance(text, str) and text.strip():
        rest, total = text.strip(), 0.0
        while match := _DURATION.match(rest):
            total += float(match[1]) * _SECONDS[match[2]]
            rest = rest[match.end() :]
        if not rest and total > 0:
            return total
    raise ValueError(f"{text!r} is no duration; write for example 90s, 45m, 6h or 1h30m")


def _as_tuple(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


Duration = Annotated[float, BeforeValidator(parse_duration_s)]


class Schema(BaseModel):
    """Base of everything that people write: unknown keys are refused, objects are frozen."""

    # a schema inside another is built as part of that one, never alone
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class ModelRef(Schema):
    """A model: a Hugging Face checkpoint folder, or a shape with random weights."""

    path: Path | None = None
    shape: StrictStr | None = None
    weights: Literal["random"] | None = None
    layers: Count | None = None

    @field_validator("path", mode="before")
    @classmethod
    def _absolute(cls, value: object, info: ValidationInfo) -> object:
        return value if value is None else resolve_path(value, info)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.shape is None):
            raise ValueError(
                "needs either path (a checkpoint folder) or shape with weights: random"
            )
        if self.path is not None and (self.weights is not None or self.layers is not None):
            raise ValueError("weights and layers go with shape; a path brings its own")
        if self.shape is not None and self.weights != "random":
            raise ValueError("a shape has no weights of its own; add weights: random")
        return self


class WorkloadSpec(Schema):
    """What is served while a configuration is measured."""

    #: builtin:code, builtin:text, humaneval, or a path to JSONL
    prompts: StrictStr
    input_len: Count
    #: tokens generated per request; 2 or more, since decoding starts after the first
    output_len: Annotated[StrictInt, Field(ge=2)]
    concurrency: Annotated[tuple[Level, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    temperature: Annotated[Number, Field(ge=0, le=10)] = 0.0
    ignore_eos: StrictBool = True
    #: Jinja text for chat messages in place of the tokenizer's own
    chat_template: StrictStr | None = None
    #: requests per repeat and concurrency level; None: one per slot
    num_prompts: Count | None = None

    @field_validator("prompts")
    @classmethod
    def _prompt_file(cls, value: str, info: ValidationInfo) -> str:
        looks_like_file = value.endswith((".jsonl", ".json")) or "/" in value
        return str(resolve_path(value, info)) if looks_like_file else value

    @field_validator("concurrency")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"{list(value)} repeats a level; list each once")
        return tuple(sorted(value))


class BackendSpec(Schema):
    """Which backend measures, with its own arguments (checked by the backend)."""

    kind: StrictStr
    args: dict[StrictStr, Any] = Field(default_factory=dict)


class Objective(Schema):
    """What "best" means: one metric per concurrency, several metrics, or a weighting of levels."""

    maximize: Annotated[tuple[Literal["tokens_per_s"], ...], BeforeValidator(_as_tuple)] = ()
    minimize: Annotated[tuple[Literal["ttft_ms", "tpot_ms"], ...], BeforeValidator(_as_tuple)] = ()
    #: concurrency -> weight: one objective, the weighted geometric mean of the ratios to baseline
    weights: dict[Annotated[int, Field(ge=1)], Positive] | None = None

    @model_validator(mode="after")
    def _something_to_optimise(self) -> Self:
        if not self.maximize and not self.minimize:
            raise ValueError("names no metric; write for example {maximize: tokens_per_s}")
        return self

    @property
    def metrics(self) -> tuple[tuple[Metric, Literal["maximize", "minimize"]], ...]:
        """Metrics with their direction, in the order of the file."""
        up: list[tuple[Metric, Literal["maximize", "minimize"]]] = [
            (metric, "maximize") for metric in self.maximize
        ]
        return (*up, *((metric, "minimize") for metric in self.minimize))


class Constraints(Schema):
    """What a configuration must keep, however fast it is."""

    #: output must equal the baseline's (or be a near-tie)
    lossless: StrictBool = True
    #: per GPU: as the model predicts it before a trial, and as the backend measures it where it can
    max_memory_gib: Positive | None = None


class Budget(Schema):
    """When the study ends, whichever comes first."""

    measured_trials: Count
    server_starts: Count | None = None
    wall_time: Duration | None = None

    @property
    def wall_time_s(self) -> float | None:
        """Wall time in seconds; None when unlimited."""
        return self.wall_time


class Measure(Schema):
    """How often one configuration is measured."""

    warmup: Annotated[StrictInt, Field(ge=0)] = 2
    min_repeats: Annotated[StrictInt, Field(ge=2)] = 3
    max_repeats: Annotated[StrictInt, Field(ge=2)] = 12
    #: half-width of the 95 % interval of the median over the median at which repeats stop
    target_rel_ci: Annotated[Number, Field(gt=0, lt=1)] = 0.01

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_repeats > self.max_repeats:
            raise ValueError(
                f"min_repeats {self.min_repeats} is above max_repeats {self.max_repeats}"
            )
        return self


class Study(Schema):
    """One study file."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=200)]
    #: path of a machine file, or "auto": this host
    machine: StrictStr = "auto"
    target: ModelRef
    draft: ModelRef | None = None
    workload: WorkloadSpec
    backend: BackendSpec
    objective: Objective = Objective(maximize=("tokens_per_s",))
    constraints: Constraints = Constraints()
    #: knob -> the values to search
    space: dict[str, tuple[Scalar, ...]]
    budget: Budget
    measure: Measure = Measure()
    #: what numpy, Optuna and torch all take, with room for the offsets of trials and requests
    seed: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] = 0
    #: SQLAlchemy URL; None: autotune.db in the current folder
    database: StrictStr | None = None

    @field_validator("name")
    @classmethod
    def _usable_in_file_names(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", value) is None:
            raise ValueError(f"{value!r} has to do as a file name; use letters, digits and . _ + -")
        return value

    @field_validator("machine")
    @classmethod
    def _machine_file(cls, value: str, info: ValidationInfo) -> str:
        return value if value == "auto" else str(resolve_path(value, info))

    @field_validator("space", mode="before")
    @classmethod
    def _dimensions(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            raise ValueError("must map knobs to values, such as speculation.steps: {int: [1, 4]}")
        parsed: dict[str, tuple[Scalar, ...]] = {}
        problems: dict[str, str] = {}
        for knob, written in value.items():
            try:
                parsed[str(knob)] = parse_dimension(str(knob), written)
            except ValueError as error:
                problems[str(knob)] = str(error)
        if problems:
            raise SpaceProblemsError(problems)
        if not parsed:
            raise ValueError("is empty; list at least one knob")
        return parsed

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if "eagle3" in self.space.get("speculation.method", ()) and self.draft is None:
            raise ValueError(
                "space.speculation.method lists eagle3 but no draft is given; add draft"
            )
        weights = self.objective.weights
        if weights is not None and set(weights) != set(self.workload.concurrency):
            raise ValueError(
                f"objective.weights has levels {sorted(weights)}; "
                f"workload.concurrency has {list(self.workload.concurrency)}"
            )
        return self

    @property
    def speculates(self) -> bool:
        """Whether any knobs of the space use speculation."""
        return "eagle3" in self.space.get("speculation.method", ())


class SpaceProblemsError(ValueError):
    """Problems of several knobs of a space at once, by knob."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{knob}: {text}" for knob, text in problems.items()))
        self.problems = dict(problems)


def resolve_path(value: object, info: ValidationInfo) -> Path:
    """Absolute path of ``value``; relative ones start at the folder of the study file."""
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is no path; write text")
    path = Path(value).expanduser()
    base = (info.context or {}).get("base")
    return path if path.is_absolute() or base is None else (Path(base) / path).resolve()
