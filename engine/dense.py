"""Which library multiplies a dense weight: the fused kernels or the vendor's.

The fused kernels read a weight at memory speed for few rows (H200, 8 layers of Qwen3-30B-A3B, wall
above the floor of the experts touched: 64 rows 0.41 ms, with the vendor's 0.46); for more the
vendor's matrix kernels win although the norm then is a kernel of its own. ``AUTOTUNE_LINEAR``
(fused, vendor, auto) decides for a worker; auto takes the vendor's above ``FUSED_MAX_ROWS`` rows.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's customary name

from engine.policy import choice
from kernels.opset import OpSet

VARIABLE = "AUTOTUNE_LINEAR"
CHOICES = ("auto", "fused", "vendor")
FUSED_MAX_ROWS = 64


class Dense:
    """Linear layers with the norm in front or the addition behind; T rows, K inputs, O outputs."""

    def __init__(self, ops: OpSet) -> None:
        chosen = choice(VARIABLE, CHOICES)
        if chosen == "auto" and ops.name != "triton":
            chosen = "fused"
        self.ops, self.choice = ops, chosen

    def uses_vendor(self, num_rows: int) -> bool:
        """Whether the vendor's kernels serve this many rows."""
        if self.choice == "auto":
            return num_rows > FUSED_MAX_ROWS
        return self.choice == "vendor"

    def norm_linear(
        self, x_TK: torch.Tensor, norm_K: torch.Tensor, eps: float, weight_OK: torch.Tensor
    ) -> torch.Tensor:
        """``rms_norm(x) W^T``."""
        if self.uses_vendor(len(x_TK)):
            return F.linear(self.ops.rms_norm(x_TK, norm_K, eps), weight_OK)
        out_TO: torch.Tensor = self.ops.norm_linear(x_TK, norm_K, eps, weight_OK)
        return out_TO

    def linear_add(
        self, x_TK: torch.Tensor, weight_OK: torch.Tensor, residual_TO: torch.Tensor | None
    ) -> torch.Tensor:
        """``x W^T + residual``."""
        if self.uses_vendor(len(x_TK)):
            if residual_TO is None:
                return F.linear(x_TK, weight_OK)
            return torch.addmm(residual_TO, x_TK, weight_OK.t())
        out_TO: torch.Tensor = self.ops.linear_add(x_TK, weight_OK, residual_TO)
        return out_TO

    def norm_logits(
        self, x_TK: torch.Tensor, norm_K: torch.Tensor, eps: float, weight_OK: torch.Tensor
    ) -> torch.Tensor:
        """``rms_norm(x) W^T`` of a head."""
        if self.uses_vendor(len(x_TK)):
            return F.linear(self.ops.rms_norm(x_TK, norm_K, eps), weight_OK)
        out_TO: torch.Tensor = self.ops.norm_lm_head(x_TK, norm_K, eps, weight_OK)
        return out_TO

    def norm_argmax(
        self, x_TK: torch.Tensor, norm_K: torch.Tensor, eps: float, weight_OK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(index_T, value_T fp32)`` of the largest of ``rms_norm(x) W^T``."""
        if self.uses_vendor(len(x_TK)):
            best = F.linear(self.ops.rms_norm(x_TK, norm_K, eps), weight_OK).max(-1)
            return best.indices, best.values.float()
        token_T, value_T = self.ops.norm_linear_argmax(x_TK, norm_K, eps, weight_OK)
        return token_T, value_T
