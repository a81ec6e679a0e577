"""Where CUDA is at hand: tokens per second of the trainer, and its share of the GPU's matrix peak.

    python tests/bench/gpu.py [--preset small] [--batch-size 256] [--d-model 512] ...   (the flags of `python -m minigpt train`)

The peak is measured, not looked up: the best of a few large bfloat16 products on the same GPU.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch

from minigpt.cli import Parser
from minigpt.cli_flags import parse_train
from minigpt.config import TransformerConfig, parameter_count
from minigpt.train import Trainer

STEPS, PRODUCTS, SIDE = 200, 50, 8192


def step_flops(config: TransformerConfig) -> float:
    """Count the floating-point operations of a step: 6 for each number of a matrix and token, and attention's two products.

    Source: Chowdhery et al., "PaLM", 2022, appendix B: 6 N + 12 L T C a token; causality is not taken off.
    """
    attention = 12 * config.n_layers * config.max_seq_len * config.d_model
    return (6.0 * parameter_count(config) + attention) * config.batch_size * config.max_seq_len


def peak_flops() -> float:
    """Return the most operations a second that a large product reaches here."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(a, b)
        torch.cuda.synchronize()
        best = max(best, PRODUCTS * 2.0 * SIDE**3 / (time.perf_counter() - start))
    return best


def main() -> None:
    """Train for a while and say how fast it went."""
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU with CUDA on this machine, so there is nothing to measure")
    config = parse_train(Parser(allow_abbrev=False), sys.argv[1:]).config
    with tempfile.TemporaryDirectory() as folder:
        config.device, config.checkpoint_dir = "cuda", folder
        trainer = Trainer(config, lambda _: None, threading.Event())
        for _ in range(20):  # to warm up
            trainer.make_step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            trainer.make_step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / STEPS
    rate, share = config.batch_size * config.max_seq_len / seconds, step_flops(config) / seconds / peak_flops()
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}: {parameter_count(config):,} parameters, {rate:,.0f} tokens/s, "
        f"{1000 * seconds:.2f} ms a step, {share:.1%} of the matrix peak\n"
    )


if __name__ == "__main__":
    main()
