"""How large the experts' tiles should be where nothing was tuned: what any shape has in common.

T tokens, K experts per token, P = T * K pairs, E experts.
"""

from kernels.launch import pow2

#: pairs per touched expert up to which a program a pair is faster than a tile of an expert's tokens
#: (H200, 128 experts: at 1.1 by 8 %; at 1.6 slower by 5 %)
_MAX_PAIRS_EACH = 1.3
#: bytes of a row that one warp loads at once: 32 lanes of 16
_WARP_BYTES = 512


def row_warps(block: int, element_bytes: int, limit: int = 8) -> int:
    """Warps of a vector kernel whose blocks are rows of ``block`` elements.

    Every warp has a part of the row. With more warps than parts some share a part and hold other
    rows: then each product waits for its vector to be handed round through shared memory.
    """
    return max(1, min(limit, block * element_bytes // _WARP_BYTES))


def touched_experts(num_tokens: int, top_k: int, num_experts: int) -> float:
    """Experts that ``num_tokens`` tokens touch together where all are as likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def pairs_each(num_tokens: int, num_pairs: int, num_experts: int) -> float:
    """Pairs per touched expert."""
    return num_pairs / touched_experts(num_tokens, num_pairs // num_tokens, num_experts)


def mostly_apart(num_tokens: int, num_pairs: int, num_experts: int) -> bool:
    """Whether so few tokens share an expert that a program a pair is the faster choice."""
    return pairs_each(num_tokens, num_pairs, num_experts) <= _MAX_PAIRS_EACH


def rows_of_expert(num_tokens: int, num_pairs: int, num_experts: int) -> int:
    """Rows of a matrix tile (16, 32 or 64): one tile should hold the tokens of most experts."""
    each = pairs_each(num_tokens, num_pairs, num_experts)
    return max(16, min(64, pow2(int(1.5 * each) + 1)))


def depth(length: int, most: int) -> int:
    """Block along ``length``, ``most`` at most: all of it in one step, else hardly any masked."""
    if pow2(length) <= most:
        return pow2(length, 16)
    block = pow2(most)
    while block > 16 and -(-length // block) * block > length * 9 / 8:
        block //= 2
    return block
