"""Safetensors folders: what is in them, checked by name and shape before anything is read.

Sharded folders (``model.safetensors.index.json``) and single files look alike from outside.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.config_json import read_json
from engine.errors import invalid

_FLOATS = ("BF16", "F16", "F32")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAMES = 4


class Checkpoint:
    """An open checkpoint folder. Raises ``EngineError`` (invalid) with one line per problem."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise invalid(f"{folder}: no such checkpoint folder")
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._handles = {path: _open(path) for path in _files(folder)}
        for path, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if name in self._file_of:
                    raise invalid(f"{path}: {name} stands in {self._file_of[name].name} as well")
                self._file_of[name] = path

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, sorted."""
        return tuple(sorted(self._file_of))

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        optional: Iterable[str] = (),
        dtypes: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Refuse missing and unknown tensors by name, wrong shapes and wrong types.

        ``dtypes`` lists safetensors type names for tensors that are not floating point.
        """
        skip = set(optional)
        missing = [n for n in shapes if n not in self._file_of and n not in skip]
        unknown = [
            n for n in self.names if n not in shapes and not n.endswith("rotary_emb.inv_freq")
        ]
        if missing:
            raise invalid(f"{self.folder}: missing {_some(missing)}")
        if unknown:
            raise invalid(f"{self.folder}: unknown {_some(unknown)}")
        for name, wanted in shapes.items():
            if name in self._file_of:
                self._check_one(name, wanted, (dtypes or {}).get(name, _FLOATS))

    def _check_one(self, name: str, wanted: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        part = self._handles[self._file_of[name]].get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if shape != wanted:
            raise invalid(
                f"{self._file_of[name]}: {name} has shape {list(shape)}, "
                f"config.json needs {list(wanted)}"
            )
        if dtype not in dtypes:
            raise invalid(
                f"{self._file_of[name]}: {name} has type {dtype}; known here: {', '.join(dtypes)}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, as stored."""
        tensor: torch.Tensor = self._handles[self._file_of[name]].get_tensor(name)
        return tensor

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a matrix; only these are read from disk."""
        part = self._handles[self._file_of[name]].get_slice(name)
        rows: torch.Tensor = part[start:stop]
        return rows

    def read_columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of a matrix."""
        part = self._handles[self._file_of[name]].get_slice(name)
        columns: torch.Tensor = part[:, start:stop]
        return columns


def _files(folder: Path) -> list[Path]:
    """The folder's files: model.safetensors if it is there, else the index's, else all."""
    index, single = folder / _INDEX, folder / _SINGLE
    if single.is_file():
        return [single]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise invalid(f"{index}: required key 'weight_map' is missing")
        files = sorted({folder / str(name) for name in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise invalid(f"{folder}: holds no *.safetensors file")
    absent = [p for p in files if not p.is_file()]
    if absent:
        if absent[0].exists():
            raise invalid(f"{absent[0]}: is no file")
        raise invalid(f"{index}: names {absent[0].name}, which is not there")
    return files


def _open(path: Path) -> Any:
    try:
        # safetensors ships no complete type hints
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise invalid(f"{path}: truncated or no safetensors file ({error})") from None


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    tensors = "tensor" if len(names) == 1 else "tensors"
    return f"{tensors} {shown}" + (f" and {more} more" if more > 0 else "")
