"""MiniGPT: train a small GPT while you watch, and open checkpoints without running them."""

__version__ = "0.1.0"
