"""Reading a study file: YAML to ``Study``, and every problem as one line with its place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from autotune.errors import UserError
from autotune.knob_values import suggestion
from autotune.schemas import SpaceProblemsError, Study
from autotune.yaml_source import KeyPath, YamlSource, parse_yaml, read_yaml


@dataclass(frozen=True)
class LoadedStudy:
    """A study with the file it came from."""

    study: Study
    source: YamlSource
    #: folder that relative paths start from
    base_dir: Path


def load_study(path: Path, name: str | None = None) -> LoadedStudy:
    """Read, check and resolve a study file; ``name`` replaces the study's own.

    Raises ``UserError`` with one line per problem: file and line, key, value, what is allowed.
    """
    return _validated(read_yaml(path), path.resolve().parent, name)


def parse_study(text: str, label: str, base_dir: Path, name: str | None = None) -> LoadedStudy:
    """The same for text, such as the study file kept in the database."""
    return _validated(parse_yaml(text, label), base_dir, name)


def _validated(source: YamlSource, base_dir: Path, name: str | None = None) -> LoadedStudy:
    if not isinstance(source.data, dict):
        kind = "empty" if source.data is None else f"a {type(source.data).__name__}"
        raise UserError(f"{source.label}: a study is a mapping of keys; this file is {kind}")
    try:
        data = source.data if name is None else {**source.data, "name": name}
        study = Study.model_validate(data, context={"base": base_dir})
    except ValidationError as error:
        raise UserError.of_problems(list(_problem_lines(error, source))) from None
    return LoadedStudy(study=study, source=source, base_dir=base_dir)


def _problem_lines(error: ValidationError, source: YamlSource) -> Iterator[str]:
    seen: set[str] = set()
    for details in error.errors(include_url=False):
        for line in _lines_of(details, source):
            if line not in seen:
                seen.add(line)
                yield line


def _lines_of(details: ErrorDetails, source: YamlSource) -> Iterator[str]:
    path = _path_in_file(details["loc"], source.data)
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, SpaceProblemsError):
        for knob, text in cause.problems.items():
            yield f"{source.place((*path, knob))}: {_dotted((*path, knob))}: {text}"
    else:
        prefix = f"{_dotted(path)}: " if path else ""
        yield f"{source.place(path)}: {prefix}{_text(details, path)}"


def _path_in_file(loc: tuple[str | int, ...], data: Any) -> KeyPath:
    """``loc`` without the parts that pydantic adds (union members, ``[key]``)."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(data, Mapping) and (part in data or (last and isinstance(part, str))):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def _dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _text(details: ErrorDetails, path: KeyPath) -> str:
    """One sentence: value and what is allowed."""
    kind, context, value = details["type"], details.get("ctx", {}), details.get("input")
    shown = _short(value)
    if kind == "extra_forbidden":
        return f"unknown key{suggestion(str(path[-1]), _keys_at(path[:-1]))}"
    if kind == "missing":
        return "is missing; add it"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"{shown} is not allowed; allowed: {context['expected']}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        keys = ", ".join(_keys_at(path))
        return f"{shown} is no mapping" + (f"; its keys are: {keys}" if keys else "")
    wanted = {
        "string_type": "text (put it in quotes if it looks like a number)",
        "int_type": "an integer",
        "int_parsing": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "finite_number": "a finite number",
        "tuple_type": "a list",
        "too_short": "at least one value",
        "string_too_short": "text that is not empty",
        "greater_than_equal": f">= {context.get('ge')}",
        "greater_than": f"> {context.get('gt')}",
        "less_than_equal": f"<= {context.get('le')}",
        "less_than": f"< {context.get('lt')}",
    }.get(kind)
    if wanted is None:
        return f"{shown}: {details['msg']}"
    return f"{shown} is not allowed; allowed: {wanted}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys_at(path: KeyPath) -> list[str]:
    """Names of the fields that the schema has at ``path``."""
    model: type[BaseModel] | None = Study
    for part in path:
        field = model.model_fields.get(str(part)) if model else None
        model = _model_in(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The schema inside ``Schema`` or ``Schema | None``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
