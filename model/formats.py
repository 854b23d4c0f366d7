"""Weight formats: bytes per weight, scales included.

Block scales: fp8 in 128 x 128 blocks with one fp32 scale; int4 in groups of 32 with a bf16 scale;
nvfp4 in groups of 16 with an fp8 scale; mxfp4 in groups of 32 with an e8m0 scale.
"""

from collections.abc import Mapping

BYTES_PER_WEIGHT: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8_block128": 1.0 + 4.0 / 128**2,
    "int8": 1.0,
    "int4_g128": 0.5 + 2.0 / 128,
    "int4_g32": 0.5 + 2.0 / 32,
    "nvfp4": 0.5 + 1.0 / 16,
    "mxfp4": 0.5 + 1.0 / 32,
}

#: matrix rate of the format's kernels relative to bf16 on tensor cores that know it
_RATE: Mapping[str, float] = {
    "fp32": 0.5,
    "fp8": 2.0,
    "fp8_block128": 2.0,
    "int8": 2.0,
    "nvfp4": 4.0,
    "mxfp4": 4.0,
}


def bytes_per_weight(weight_format: str) -> float:
    """Bytes a weight takes, its share of the scales included; raises ``ValueError`` by name."""
    if weight_format not in BYTES_PER_WEIGHT:
        known = ", ".join(BYTES_PER_WEIGHT)
        raise ValueError(f"unknown weight format {weight_format!r}; known: {known}")
    return BYTES_PER_WEIGHT[weight_format]


def relative_rate(weight_format: str) -> float:
    """Tensor-core rate relative to bf16; weight-only formats (int4) multiply in bf16."""
    bytes_per_weight(weight_format)
    return _RATE.get(weight_format, 1.0)


def format_from_hf(quantization: Mapping[str, object] | None, torch_dtype: str) -> str:
    """Weight format a Hugging Face ``quantization_config`` declares (None: the dtype's own).

    Raises ``ValueError`` for a method or group size that is not known.
    """
    if not quantization:
        return _dtype_format(torch_dtype)
    method = str(quantization.get("quant_method", ""))
    if method == "fp8":
        return "fp8_block128" if quantization.get("weight_block_size") else "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method in ("modelopt", "modelopt_fp4") or "NVFP4" in str(quantization.get("quant_algo", "")):
        algo = str(quantization.get("quant_algo", "NVFP4")).upper()
        return "nvfp4" if "FP4" in algo else "fp8"
    if method in ("gptq", "awq", "compressed-tensors", "auto-round"):
        return _grouped_format(quantization)
    raise ValueError(
        f"quantization_config.quant_method {method!r} is unknown; "
        "known: fp8, mxfp4, modelopt, compressed-tensors, gptq, awq"
    )


def _dtype_format(torch_dtype: str) -> str:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16"}
    name = torch_dtype.removeprefix("torch.")
    if name not in names:
        raise ValueError(f"torch_dtype {torch_dtype!r} is unknown; known: {', '.join(names)}")
    return names[name]


def _grouped_format(quantization: Mapping[str, object]) -> str:
    """Integer (or fp4/fp8) weights with group scales, from any of the three spellings."""
    weights: Mapping[str, object] = quantization
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        if isinstance(first, Mapping) and isinstance(first.get("weights"), Mapping):
            weights = first["weights"]
    bits = weights.get("num_bits", weights.get("bits"))
    group = weights.get("group_size")
    kind = str(weights.get("type", "int"))
    if bits == 8:
        return "fp8" if kind == "float" else "int8"
    if bits == 4 and kind == "float":
        return "nvfp4" if group == 16 else "mxfp4"
    if bits == 4 and group in (32, 128):
        return f"int4_g{group}"
    raise ValueError(
        f"quantization_config: {bits} bits in groups of {group} ({kind}) is not a known format; "
        "known: 8 bits; int 4 bits in groups of 32 or 128; float 4 bits"
    )
