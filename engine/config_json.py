"""Hugging Face config.json files, read by name: a wrong value is one line naming file and key.

A missing key stops with its name rather than guess a default. Keys that would change what a model
computes, and that the engine does not compute, are refused whatever their place.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import invalid

#: no model is larger in any one size; beyond, a file is broken, and listing its tensors hangs
_LARGEST = 1 << 24


class Keys:
    """Reads keys of one config file by name; raises ``EngineError`` (invalid)."""

    def __init__(self, data: Mapping[str, Any], source: Path) -> None:
        self.data, self.source = data, source

    def get(self, kind: type, *names: str) -> Any:
        """The first of ``names`` that is there, of type ``kind``."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise invalid(f"{self.source}: {name} must be {kind.__name__}, got {value!r}")
            return value
        raise invalid(f"{self.source}: required key {names[0]!r} is missing")

    def maybe(self, kind: type, name: str) -> Any:
        """As ``get``; None where the key is absent or null."""
        return None if self.data.get(name) is None else self.get(kind, name)

    def positive(self, *names: str, most: int = _LARGEST) -> int:
        """A count."""
        value: int = self.get(int, *names)
        if not 1 <= value <= most:
            name = next(n for n in names if self.data.get(n) is not None)
            raise invalid(f"{self.source}: {name} must be between 1 and {most:,}, got {value}")
        return value

    def maybe_positive(self, name: str) -> int | None:
        """A count; None where the key is absent or null."""
        return None if self.data.get(name) is None else self.positive(name)

    def rms_eps(self) -> float:
        """What a norm adds to the mean square."""
        value: float = self.get(float, "rms_norm_eps")
        if not (math.isfinite(value) and value >= 0):
            raise invalid(f"{self.source}: rms_norm_eps must be 0 or more, got {value!r}")
        return value

    def head_dim(self, hidden: int | None = None, heads: int = 1) -> int:
        """Size of a head; where the key is absent, ``hidden`` shared by ``heads``, if given."""
        if hidden is None or self.data.get("head_dim") is not None:
            size = self.positive("head_dim")
        elif hidden % heads:
            raise invalid(
                f"{self.source}: head_dim is missing, and num_attention_heads {heads} does not "
                f"divide hidden_size {hidden}"
            )
        else:
            size = hidden // heads
        if size % 2:
            raise invalid(
                f"{self.source}: head_dim {size} must be even: positions turn pairs of values"
            )
        return size

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object inside the file; empty where the key is absent or null."""
        value = self.data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise invalid(f"{self.source}: {name} must be an object, got {value!r}")
        return value

    def rope_theta(self, *, default: float | None = None) -> float:
        """Base of the rotary positions, plain ones only.

        Stands at the top level, in ``rope_scaling`` or, as newer transformers write it, in
        ``rope_parameters``; each reader prefers another place, so they must agree.
        """
        found: dict[str, Any] = {"rope_theta": self.data.get("rope_theta")}
        factor = {"partial_rotary_factor": self.data.get("partial_rotary_factor")}
        for place in ("rope_parameters", "rope_scaling"):
            rope = self.mapping(place)
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise invalid(
                    f"{self.source}: {place}: rope_type {kind!r} is not supported; known: default"
                )
            found[f"{place}.rope_theta"] = rope.get("rope_theta")
            factor[f"{place}.partial_rotary_factor"] = rope.get("partial_rotary_factor")
        for name, value in factor.items():
            if value not in (None, 1):
                raise invalid(f"{self.source}: {name} {value!r} is not supported; known: 1.0")
        thetas = {name: self._theta(name, v) for name, v in found.items() if v is not None}
        if len(set(thetas.values())) > 1:
            listed = ", ".join(f"{name} {value:g}" for name, value in thetas.items())
            raise invalid(f"{self.source}: {listed}: they must be the same")
        theta = next(iter(thetas.values()), default)
        if theta is None:
            raise invalid(f"{self.source}: required key 'rope_theta' is missing")
        return theta

    def _theta(self, name: str, value: object) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and math.isfinite(value) and value > 0:  # type: ignore[arg-type, operator]
            return float(value)  # type: ignore[arg-type]
        raise invalid(f"{self.source}: {name} must be a number above 0, got {value!r}")

    def require(self, name: str, default: object, wanted: object) -> None:
        """Refuse a variant of the architecture that the engine does not compute."""
        value = self.data.get(name, default)
        if value != wanted:
            raise invalid(f"{self.source}: {name} {value!r} is not supported; known: {wanted!r}")

    def refuse_quantized(self) -> None:
        """Refuse weights stored in a format of their own (FP8, AWQ, GPTQ, NVFP4, ...)."""
        for name in ("quantization_config", "compression_config"):
            found = self.data.get(name)
            if found:
                method = found.get("quant_method") if isinstance(found, dict) else found
                raise invalid(
                    f"{self.source}: {name} {method!r}: quantized weights are not supported; use "
                    "the model's BF16, FP16 or FP32 checkpoint"
                )

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: of generation_config.json beside the file, else of the file."""
        generation = self.source.parent / "generation_config.json"
        source, eos = generation, None
        if generation.is_file():
            eos = read_json(generation).get("eos_token_id")
        if eos is None:
            source, eos = self.source, self.data.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise invalid(f"{source}: eos_token_id must be a token or a list of them, got {eos!r}")
        return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; one clear line when it is missing or broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid(f"{path}: must hold a JSON object")
    return data
