"""Drawing the next token from logits.

T rows, V vocabulary.
"""

import torch

from kernels.verify import inverse_transform_ref


def sample_ref(
    logits_TV: torch.Tensor, temperature: float | torch.Tensor, uniform_T: torch.Tensor
) -> torch.Tensor:
    """``token_T`` int64: inverse transform of ``uniform_T`` in softmax(logits / temperature).

    ``temperature`` is one number or one per row; 0 means the argmax (the first, in a tie).
    """
    temperature_T = torch.as_tensor(temperature, dtype=torch.float32, device=logits_TV.device)
    temperature_T = temperature_T.expand(logits_TV.shape[0])
    greedy_T = temperature_T <= 0
    wide_TV = logits_TV.float() / torch.where(greedy_T, 1.0, temperature_T)[:, None]
    drawn_T = inverse_transform_ref(wide_TV.softmax(-1), uniform_T)
    return torch.where(greedy_T, logits_TV.argmax(-1), drawn_T)
