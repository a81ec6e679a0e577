"""Cross-entropy of a linear head without ever holding all logits: chunk by chunk, so that they stay in the processor's cache.

A vocabulary of thousands makes the logits by far the largest tensor of a small model; writing and reading them from memory several times would
take most of a step. Here each chunk's logits become probabilities, and those the gradients, during the forward pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ELEMENTS = 1 << 19  # logits held at once: few enough for the cache, so many that starting a product costs little


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(hidden @ weight.T)[target]; its gradient is softmax minus one-hot."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        N = hidden.size(0)
        rows = _rows(hidden, weight)
        h_all, w = hidden.to(dtype), weight.to(dtype)  # (N, C), (V, C)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        buffer = h_all.new_empty(rows, weight.size(0))
        total = hidden.new_zeros(())
        for start in range(0, N, rows):
            h, y = h_all[start : start + rows], targets[start : start + rows]
            product = torch.mm(h, w.T, out=buffer[: len(h)])  # (rows, V)
            logits = product.to(hidden.dtype)
            probabilities = torch.softmax(logits, 1, out=logits)
            total -= probabilities.gather(1, y[:, None]).clamp_(min=torch.finfo(hidden.dtype).tiny).log_().sum()
            product.copy_(probabilities)
            grad_hidden[start : start + rows] = product @ w
            grad_weight += product.T @ h
        grad_hidden.sub_(weight[targets]).div_(N)
        grad_weight.index_add_(0, targets, hidden, alpha=-1).div_(N)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean cross-entropy in nats of logits `hidden @ weight.T` against `targets`.

    With gradients, a target less likely than the smallest normal number counts as that (87 nats in float32); its gradients are right.

    Args:
        hidden: (N, C) float.
        weight: (V, C) float.
        targets: (N,) int64.
        dtype: of what goes into the products where there are gradients; softmax, loss and sums stay in that of `hidden`.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, dtype or hidden.dtype)  # type: ignore[no-untyped-call]
        return loss
    rows = _rows(hidden, weight)
    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.stack([F.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in pairs]).sum() / hidden.size(0)


def _rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, min(hidden.size(0), CHUNK_ELEMENTS // weight.size(0)))
