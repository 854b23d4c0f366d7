"""Tree verification and sampling: equal to the references, and lossless in distribution."""

import pytest
import torch

from kernels.opset import opset
from kernels.verify_kernels import MAX_NODES
from tests.kernels.helpers import REFERENCE, TRITON, assert_same

PARENTS = [[-1, 0, 0, 1, 2, 2, 4, -1], [-1, 0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 0, 0, 1, 1, 5]]


@pytest.mark.parametrize("seed", range(3))
def test_verify_greedy_equals_reference(device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    parent = torch.tensor(PARENTS)
    token, target = torch.randint(0, 3, (2, 3, 8))
    assert_same("verify_greedy", token.to(device), parent.to(device), target.to(device))


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_verify_greedy_walks_the_matching_branch(device: torch.device, name: str) -> None:
    def tensor(*values: int) -> torch.Tensor:
        return torch.tensor([values], device=device)

    # root(9) -> {1: "5", 2: "7"}; 2 -> {3: "8", 4: "6"}; 4 -> {5: "1"}
    parent, token = tensor(-1, 0, 0, 2, 2, 4), tensor(9, 5, 7, 8, 6, 1)
    path, accepted, following = opset(name).verify_greedy(token, parent, tensor(7, 0, 6, 0, 3, 0))
    assert path.tolist() == [[0, 2, 4, -1, -1, -1]]
    assert accepted.tolist() == [2]
    assert following.tolist() == [3]
    _, accepted, following = opset(name).verify_greedy(token, parent, tensor(4, 0, 6, 0, 3, 0))
    assert (accepted.tolist(), following.tolist()) == ([0], [4])


@pytest.mark.parametrize("with_draft", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("seed", range(3))
def test_verify_sampling_equals_reference(
    device: torch.device, with_draft: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    parent, vocabulary = torch.tensor(PARENTS), 50
    target, draft = torch.rand(2, 3, 8, vocabulary).pow(6)
    target /= target.sum(-1, keepdim=True)
    draft /= draft.sum(-1, keepdim=True)
    token = torch.randint(0, vocabulary, (3, 8))
    # one deep acceptance for certain: node 1's token has all of the root's probability
    target[0, 0] = torch.nn.functional.one_hot(token[0, 1], vocabulary)
    uniform, last = torch.rand(3, 8) * 0.2, torch.rand(3)
    values = (token, parent, draft if with_draft else None, target, uniform, last)
    assert_same("verify_sampling", *(x if x is None else x.to(device) for x in values))


def chi_square(tokens: torch.Tensor, probability: torch.Tensor) -> float:
    """Pearson's statistic of observed tokens against a distribution."""
    wanted = probability * len(tokens)
    counted = torch.bincount(tokens, minlength=len(probability)).float()
    return float(((counted - wanted) ** 2 / wanted).sum())


#: 99.99 % quantile of chi-square with 4 degrees of freedom
LIMIT = 23.5


def first_tokens(mode: str, rule_is_right: bool = True) -> torch.Tensor:
    """First token after the root over many draws: three children, then the target's own draw."""
    generator = torch.Generator().manual_seed(11)
    count, vocabulary = 6000, 5
    target = TARGET.expand(count, 4, vocabulary)
    draft = torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1]).expand(count, 4, vocabulary)
    if mode == "chosen":
        children = torch.tensor([1, 3, 0]).expand(count, 3)
        given = None
    else:
        children = torch.multinomial(draft[:, 0], 3, generator=generator)
        given = draft
    token = torch.cat([torch.zeros(count, 1, dtype=torch.int64), children], dim=1)
    parent = torch.tensor([-1, 0, 0, 0]).expand(count, 4)
    uniform = torch.rand(count, 4, generator=generator)
    if not rule_is_right:
        uniform = uniform * 0.7
    last = torch.rand(count, generator=generator)
    path, accepted, following = REFERENCE.verify_sampling(
        token, parent, given, target, uniform, last
    )
    chosen = token.gather(1, path[:, 1:2].clamp(min=0))[:, 0]
    return torch.where(accepted > 0, chosen, following)


TARGET = torch.tensor([0.35, 0.1, 0.25, 0.2, 0.1])


@pytest.mark.parametrize("mode", ["chosen", "drawn"])
def test_the_emitted_token_has_the_targets_distribution(mode: str) -> None:
    assert chi_square(first_tokens(mode), TARGET) < LIMIT


@pytest.mark.parametrize("mode", ["chosen", "drawn"])
def test_the_statistic_notices_a_rule_that_accepts_too_often(mode: str) -> None:
    assert chi_square(first_tokens(mode, rule_is_right=False), TARGET) > LIMIT


def test_sample_equals_reference(device: torch.device) -> None:
    logits, uniform = torch.randn(4, 333).to(device), torch.rand(4).to(device)
    assert_same("sample", logits, 0.7, uniform)
    assert_same("sample", logits, torch.tensor([0.0, 1.0, 0.0, 3.0], device=device), uniform)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_sample_never_returns_an_impossible_token(device: torch.device, name: str) -> None:
    logits = torch.full((3, 40), float("-inf"), device=device)
    logits[:, 5], logits[:, 21] = 0.0, 0.0
    uniform = torch.tensor([0.0, 0.4999, 1.0], device=device)
    token = opset(name).sample(logits, 1.0, uniform)
    assert token.tolist() == [5, 5, 21]


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_temperature_zero_takes_the_first_largest(device: torch.device, name: str) -> None:
    logits = torch.zeros(2, 40, device=device)
    logits[:, [7, 8]] = 2.0
    assert opset(name).sample(logits, 0.0, torch.rand(2, device=device)).tolist() == [7, 7]


def test_sample_has_the_distribution_of_the_softmax(device: torch.device) -> None:
    count = 60
    uniform = ((torch.arange(count) + 0.5) / count).to(device)
    logits = (2 * TARGET.log()).expand(count, 5).contiguous().to(device)
    token = TRITON.sample(logits, 2.0, uniform)
    counted = torch.bincount(token.cpu(), minlength=5).float() / count
    torch.testing.assert_close(counted, TARGET, rtol=0, atol=2 / count)


def test_a_tree_that_is_too_large_is_refused() -> None:
    token = torch.zeros(1, MAX_NODES + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 1024 nodes a tree, got 1025"):
        TRITON.verify_greedy(token, token, token)
