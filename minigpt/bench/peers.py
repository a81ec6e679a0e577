"""What people would otherwise use, for the same model and batch: a plain loop of PyTorch, and transformers' Trainer."""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from minigpt.config import TransformerConfig
from minigpt.model import Attention, MiniGPT


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of the training ids with its next tokens, one at a time, as tutorials have it."""

    def __init__(self, ids: Tensor, length: int) -> None:
        self.ids, self.length = ids, length

    def __len__(self) -> int:
        """Number of windows, which overlap."""
        return len(self.ids) - self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (T,)."""
        return self.ids[index : index + self.length], self.ids[index + 1 : index + self.length + 1]


class LabelledWindows(Dataset[dict[str, Tensor]]):
    """The same windows in the form that transformers' Trainer takes; it shifts the labels itself."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window twice."""
        x, _ = self.windows[index]
        return {"input_ids": x, "labels": x}


class PlainAttention(Attention):
    """Attention written out: all scores, a mask, a softmax."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Mix x (B, T, C) over time."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)  # three times (B, H, T, D)
        scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, T, T)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v  # (B, H, T, D)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, C))  # (B, T, C)
        return out


def plain_loop(config: TransformerConfig, ids: Tensor) -> Callable[[], None]:
    """Return a function that makes one step of a plain loop: DataLoader, unfused attention, whole logits, unfused AdamW."""
    model = MiniGPT(config)
    for block in model.blocks:
        block.attention = PlainAttention(config)
    loader = DataLoader(Windows(ids, config.max_seq_len), batch_size=config.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=False)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        loss.item()

    return step


def has_transformers() -> bool:
    """Tell whether transformers' Trainer can be used here."""
    return all(importlib.util.find_spec(name) is not None for name in ("transformers", "accelerate"))


def transformers_rate(config: TransformerConfig, ids: Tensor, steps: int, folder: Path) -> float:
    """Return tokens per second of GPT-2 of the same shape under transformers' Trainer with its own defaults, after one step to warm up."""
    hf: Any = importlib.import_module("transformers")
    hf.logging.set_verbosity_error()
    times: list[float] = []

    class Clock(hf.TrainerCallback):  # type: ignore[misc]  # transformers is not known to the type checker
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    shape = {"n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads, "n_inner": config.d_ff}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"vocab_size": config.vocab_size, "n_positions": config.max_seq_len, "bos_token_id": 0, "eos_token_id": 0}
    arguments = hf.TrainingArguments(
        output_dir=str(folder / "transformers"), max_steps=steps + 1, per_device_train_batch_size=config.batch_size, use_cpu=True,
        learning_rate=config.learning_rate, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**size, **shape, **no_dropout))
    windows = LabelledWindows(Windows(ids, config.max_seq_len))
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=windows, callbacks=[Clock()])
    trainer.remove_callback(hf.PrinterCallback)  # it writes to standard output, which belongs to the table
    trainer.train()
    return (len(times) - 1) * config.batch_size * config.max_seq_len / (times[-1] - times[0])
