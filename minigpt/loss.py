"""Cross-entropy of a linear head without ever holding all logits: chunk by chunk, so that they stay in the processor's cache.

A vocabulary of thousands makes the logits by far the largest tensor of a small model; writing and reading them from memory several times would
take most of a step. Here each chunk's logits become probabilities, and those the gradients, during the forward pass.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18  # logits held at once: 1 MB in float32, which fits a core's second-level cache


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(hidden @ weight.T)[target]; its gradient is softmax minus one-hot."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        N, V = hidden.size(0), weight.size(0)
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        rows = max(1, min(N, CHUNK_ELEMENTS // V))
        grad_hidden = torch.empty_like(hidden) if needs_grad else None  # (N, C)
        grad_weight = torch.zeros_like(weight) if needs_grad else None  # (V, C)
        buffer = hidden.new_empty(rows, V)
        total = hidden.new_zeros(())
        for start in range(0, N, rows):
            h, y = hidden[start : start + rows], targets[start : start + rows]
            logits = torch.mm(h, weight.T, out=buffer[: len(h)])  # (rows, V)
            highest, picked = logits.amax(1), logits.gather(1, y[:, None])[:, 0]
            probabilities = torch.softmax(logits, 1, out=logits)
            total += (highest - probabilities.amax(1).log() - picked).sum()  # log of the sum of exponentials, less the target's logit
            if grad_hidden is not None and grad_weight is not None:
                torch.mm(probabilities, weight, out=grad_hidden[start : start + rows])
                grad_weight.addmm_(probabilities.T, h)
        if grad_hidden is not None and grad_weight is not None:
            grad_hidden.sub_(weight[targets]).div_(N)
            grad_weight.index_add_(0, targets, hidden, alpha=-1).div_(N)
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return total / N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits `hidden @ weight.T` against `targets`.

    Args:
        hidden: (N, C) float.
        weight: (V, C) float.
        targets: (N,) int64.
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return loss
