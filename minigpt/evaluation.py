"""The validation loss of a model. Knows nothing of training or of when to measure."""

import math
import threading

import torch

from minigpt.data import ValLoader
from minigpt.model import MiniGPT


@torch.inference_mode()
def evaluate(model: MiniGPT, val_loader: ValLoader, device: torch.device | str, stop_event: threading.Event | None = None) -> float:
    """Return the mean cross-entropy in nats per token over all batches, each token counting the same.

    The model's mode is restored whatever happens. NaN if the loader is empty or the stop event is set before the end.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for x, y in val_loader:
            if stop_event is not None and stop_event.is_set():
                return math.nan
            total += float(model.loss(x.to(device), y.to(device))) * y.numel()
            count += y.numel()
    finally:
        model.train(was_training)
    return total / count if count else math.nan
