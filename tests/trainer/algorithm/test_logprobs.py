from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import structlog.testing
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from trainer.algorithm import logprobs
from trainer.algorithm.logprobs import fused, of_logits, token_logprobs


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens: int, entropy_gradient: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 50, bias=True).double()
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (11,))
    temperature = torch.rand(11) + 0.5
    logits = head(hidden) / temperature[:, None]
    wanted = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    wanted_loss = wanted.square().sum() + entropy_gradient * entropy.square().sum()
    wanted_gradients = torch.autograd.grad(wanted_loss, [hidden, head.weight])

    found, found_entropy = token_logprobs(
        head,
        hidden,
        targets,
        temperature,
        50,
        logits_per_chunk=50 * chunk_tokens,
        entropy_gradient=entropy_gradient,
    )
    loss = found.square().sum() + entropy_gradient * found_entropy.square().sum()
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found_entropy, entropy.float(), atol=1e-5, rtol=1e-5)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, atol=1e-4, rtol=1e-4)
    assert found_entropy.requires_grad is entropy_gradient


class LiveBytes(TorchDispatchMode):
    """Measures the peak memory of tensors that operations create."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                size = storage.nbytes()
                self._known[storage] = size
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def test_memory_is_that_of_a_chunk_whatever_the_vocabulary_and_the_tokens() -> None:
    def peak(vocabulary: int, tokens: int, logits_per_chunk: int = 1 << 15, *, entropy_gradient: bool = False) -> int:
        head = nn.Linear(4, vocabulary, bias=False)
        hidden_ND = torch.randn(tokens, 4, requires_grad=True)
        targets_N = torch.randint(0, vocabulary, (tokens,))
        live = LiveBytes()
        with live:
            found, entropy = token_logprobs(
                head,
                hidden_ND,
                targets_N,
                torch.ones(tokens),
                vocabulary,
                logits_per_chunk,
                entropy_gradient=entropy_gradient,
            )
            torch.autograd.backward(found.sum() + entropy.sum())
        return live.most

    chunk = 4 * (1 << 15)
    peaks = [peak(vocabulary, tokens) for vocabulary in (512, 2048) for tokens in (256, 1024)]
    assert max(peaks) < 6 * chunk  # gradients and hidden states are small here
    assert max(peaks) < 1.5 * min(peaks)
    assert peak(2048, 1024, logits_per_chunk=2048 * 1024) > 4 * max(peaks)  # the measurement itself must work
    through_entropy = [peak(2048, tokens, entropy_gradient=True) for tokens in (256, 1024)]
    assert max(through_entropy) < 8 * chunk
    assert through_entropy[1] < 1.5 * through_entropy[0]


def test_no_more_than_a_chunk_of_logits_is_ever_made() -> None:
    sizes: list[int] = []
    weight = torch.randn(50, 8, requires_grad=True)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0])
        return hidden @ weight.T

    found, _ = token_logprobs(head, torch.randn(10, 8), torch.arange(10), torch.ones(10), 50, logits_per_chunk=150)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert max(sizes) == 3
    assert sum(sizes) == 20  # forward, and once more for the backward pass
    assert weight.grad is not None


@pytest.fixture
def untried() -> Iterator[None]:
    fused.cache_clear()
    yield
    fused.cache_clear()


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile takes a C++ compiler")
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_for_a_gpu_computes_the_same(dtype: torch.dtype, entropy_gradient: bool) -> None:
    """The function is compiled and compared on a CPU; it is the one used on a GPU."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 50, generator=generator).to(dtype).requires_grad_()
    targets, temperature = torch.arange(7), torch.rand(7, generator=generator) + 0.5
    with structlog.testing.capture_logs() as logs:
        compiled = fused(torch.device("cpu"), entropy_gradient)
    assert compiled is not of_logits
    assert logs == []
    results = []
    for scored in (of_logits, compiled):
        found, entropy = scored(logits, targets, temperature, entropy_gradient)
        (gradient,) = torch.autograd.grad(found.square().sum() + entropy_gradient * entropy.square().sum(), logits)
        assert entropy.requires_grad is entropy_gradient
        results.append((found, entropy, gradient))
    for wanted, got in zip(*results, strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5 if wanted.dtype is torch.float32 else 1e-2)


@pytest.mark.usefixtures("untried")
def test_without_a_compiler_it_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(logprobs, "compiled", lambda function, dynamic: broken)
    with structlog.testing.capture_logs() as logs:
        assert fused(torch.device("cpu")) is of_logits
        assert fused(torch.device("cpu")) is of_logits
    assert [line["reason"] for line in logs] == ["RuntimeError: no C compiler"], "said once"
