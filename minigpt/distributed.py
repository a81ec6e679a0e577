"""Many processes training one model: what `torchrun --nproc_per_node=N -m minigpt train ...` does, over gloo or NCCL.

Each process draws the same batch and takes its slice, gradients are averaged by DistributedDataParallel, losses by hand, so the run is that of one
process with the same settings. The first process alone speaks, samples and writes. Without torchrun's environment nothing here is used.
"""

import gc
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt import train as one
from minigpt.config import TransformerConfig
from minigpt.data import ValLoader
from minigpt.errors import ConfigError
from minigpt.events import Callback, Reason
from minigpt.model import MiniGPT
from minigpt.resume import find_checkpoint, resumed_config
from minigpt.tokenizer import TextTokenizer


def train(
    config: TransformerConfig, callback: Callback | None = None, stop_event: threading.Event | None = None, *, resume: Path | None = None
) -> tuple[MiniGPT, TextTokenizer]:
    """Train as `minigpt.train.train` does, together with the other processes that torchrun started, if it did.

    All processes must be given equal settings. Only the first calls its callback and writes files; a stop asked of any stops all.

    Raises:
        ConfigError: also if the batch cannot be split evenly.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return one.train(config, callback, stop_event, resume=resume)
    config.check()
    if config.batch_size % size:
        advice = -(-config.batch_size // size) * size
        raise ConfigError(f"batch_size is {config.batch_size}; it must be a multiple of the number of processes, {size}: try {advice}")
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    config.device, config.threads = "cpu" if on_cpu else "cuda", config.threads or 1  # no trials: they could end differently on each
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    try:
        first = dist.get_rank() == 0
        config.vocab_path = config.vocab_path if first else ""
        return RankTrainer(config, callback if first and callback else lambda _: None, stop_event or threading.Event(), resume).run()
    finally:
        gc.collect()  # what still refers to the group would keep its threads from being joined
        dist.destroy_process_group()


def lend_a_hand(config: TransformerConfig, stop_event: threading.Event, resume: Path | None = None, max_steps: int | None = None) -> None:
    """Be one of the processes that train but neither speak nor write.

    Args:
        config: of a new run.
        stop_event: stops all.
        resume: instead, the run to go on with: its folder or one of its checkpoints.
        max_steps: its new end.
    """
    found = find_checkpoint(resume) if resume is not None else None
    config = config if found is None else resumed_config(found, found.path.parent, max_steps=max_steps)
    train(config, None, stop_event, resume=found.path if found is not None else None)


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model: MiniGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.loss(x, y)


class RankTrainer(one.Trainer):
    """One of several trainers that make the same steps. Whatever decides the way of the loop is agreed on before it is used."""

    def __init__(self, config: TransformerConfig, emit: Callback, stop: threading.Event, resume: Path | None = None) -> None:
        super().__init__(config, emit, stop, resume)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # DistributedDataParallel never lets go of its group, so that its threads live on, and one that drops a tensor while the interpreter ends
        # aborts the process. Those of a group of its own have long been idle by then; the others are joined as their group is destroyed.
        self.parallel = nn.parallel.DistributedDataParallel(_Loss(self.model), process_group=dist.new_group(), forward_sync_buffers=False)
        if self.rank > 0:
            torch.manual_seed(config.seed + self.rank)  # each its own dropout

    def _sum(self, *numbers: float) -> list[float]:
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return [float(number) for number in summed.tolist()]

    def should_stop(self) -> bool:
        """Tell whether any process was asked to stop; then all are."""
        if asked := self._sum(self.stop.is_set())[0] > 0:
            self.stop.set()
        return asked  # not is_set: it may have come after the sum

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Leave the gradients of the whole batch; return its loss."""
        loss: Tensor = self.parallel(x.chunk(self.size)[self.rank], y.chunk(self.size)[self.rank])
        loss.backward()
        dist.all_reduce(loss.detach())  # in place
        return loss / self.size

    def measure(self, model: MiniGPT, loader: ValLoader, stop: threading.Event | None) -> float:
        """Evaluate a share of the windows each; the first process says how many there are. Another model is its business alone."""
        if model is not self.model:
            return super().measure(model, loader, stop)
        return self._share(int(self._sum(len(loader.windows) if self.rank == 0 else 0)[0]), stop)

    def _share(self, count: int, stop: threading.Event | None) -> float:
        whole = self.text.val_loader.subset(count)
        own = ValLoader(whole.dataset, whole.batch_size, whole.windows[self.rank :: self.size])
        loss = super().measure(self.model, own, stop) * own.targets if own.windows else 0.0
        total, targets, stopped = self._sum(loss, own.targets, stop is self.stop and stop.is_set())
        if stopped:
            self.stop.set()
        return total / targets  # NaN if the evaluation of one was cut short

    def sample(self, stop: threading.Event | None) -> None:
        """Write a sample, on the first process."""
        if self.rank == 0:
            super().sample(stop)

    def save(self, name: str) -> None:
        """Save, on the first process."""
        if self.rank == 0:
            super().save(name)

    def finish(self, reason: Reason) -> None:
        """End the run as the first process does; the others lend a hand to its evaluations until it has done."""
        if self.rank == 0:
            super().finish(reason)
        while count := self._sum(0)[0]:  # windows of which the first process wants its share measured, or none once it has done
            self._share(int(count), None)
