"""What people would otherwise use, for the same model and batch: a plain loop of PyTorch, and transformers' Trainer."""

import importlib
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from minigpt.bench.setup import rate
from minigpt.config import TransformerConfig
from minigpt.model import Attention, MiniGPT


class PlainAttention(Attention):
    """Attention written out: all scores, a mask, a softmax."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Mix x (B, T, C) over time."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)  # three times (B, H, T, D)
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)  # (B, H, T, T)
        out: Tensor = self.out((torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(B, T, C))  # (B, T, C)
        return out


# Given settings, training ids and a number of steps, a peer returns a function that trains so far and returns tokens per second.
Peer = Callable[[TransformerConfig, Tensor, int], Callable[[], float]]


def plain_loop(config: TransformerConfig, ids: Tensor, steps: int) -> Callable[[], float]:
    """Time a plain loop: DataLoader over windows, unfused attention, whole logits, unfused AdamW."""
    model = MiniGPT(config)
    for index, block in enumerate(model.blocks):
        block.attention = PlainAttention(config, index)
    loader: Iterable[Tensor] = DataLoader(_windows(config, ids), batch_size=config.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    batches = chain.from_iterable(repeat(loader))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=False)

    def step() -> None:
        batch = next(batches)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        loss.item()

    return lambda: rate(step, steps, config.batch_size * config.max_seq_len)


def _windows(config: TransformerConfig, ids: Tensor) -> Tensor:
    # Every window of the ids with its next token, (N, T + 1). A DataLoader indexes a tensor as any dataset: one by one, then collated.
    return ids.unfold(0, config.max_seq_len + 1, 1)


def transformers_loop(config: TransformerConfig, ids: Tensor, steps: int) -> Callable[[], float]:
    """Time GPT-2 of the same shape under transformers' Trainer with its own defaults; NaN where transformers is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
        return lambda: math.nan
    hf: Any = importlib.import_module("transformers")
    hf.logging.set_verbosity_error()
    times: list[float] = []

    class Clock(hf.TrainerCallback):  # type: ignore[misc]  # transformers is not known to the type checker
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    size = {"vocab_size": config.vocab_size, "n_positions": config.max_seq_len, "n_embd": config.d_model, "n_inner": config.d_ff}
    depth = {"n_layer": config.n_layers, "n_head": config.n_heads, "bos_token_id": 0, "eos_token_id": 0}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**size, **depth, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    same = {"per_device_train_batch_size": config.batch_size, "learning_rate": config.learning_rate, "use_cpu": True}

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            arguments = hf.TrainingArguments(output_dir=folder, max_steps=steps + 1, **same, **quiet)
            trainer = hf.Trainer(model, arguments, train_dataset=_windows(config, ids), data_collator=_labelled, callbacks=[Clock()])
            trainer.remove_callback(hf.PrinterCallback)  # it writes to standard output, which belongs to the table
            times.clear()
            trainer.train()
        return steps * config.batch_size * config.max_seq_len / (times[-1] - times[0])

    return run


def _labelled(rows: list[Tensor]) -> dict[str, Tensor]:
    x = torch.stack(rows)[:, :-1]
    return {"input_ids": x, "labels": x}  # the model shifts the labels itself
