"""Ready-made runs: what each is for, how long it takes, and which settings differ from `classic`."""

from dataclasses import dataclass, field
from typing import Any

from minigpt.config import TransformerConfig, parameter_count


@dataclass(frozen=True)
class Preset:
    """A named set of settings. `seconds` is the expected time of a whole run on two free CPU cores."""

    label: str
    sentence: str
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> TransformerConfig:
        """Return the preset's settings with some of them changed."""
        return TransformerConfig(**{**self.settings, **changes})


MODERN = {"arch": "modern", "optimizer": "muon", "dropout": 0.0, "weight_decay": 0.0, "min_lr": 0.0}

PRESETS: dict[str, Preset] = {
    "quick": Preset(
        "Quick",
        "Whole words, a modern recipe: verse in about ten seconds.",
        10,
        {
            **MODERN, "n_heads": 2, "batch_size": 32, "learning_rate": 0.045, "weight_decay": 0.1, "warmup_steps": 8, "max_steps": 420,
            "log_interval": 5, "eval_interval": 40,
        },
    ),
    "chars": Preset(
        "Letters",
        "Letter by letter: it must learn to spell before it can write.",
        20,
        {
            **MODERN, "tokenizer": "char", "vocab_size": 200, "d_model": 128, "n_layers": 4, "d_ff": 512, "batch_size": 16,
            "learning_rate": 0.04, "warmup_steps": 5, "max_steps": 320, "log_interval": 5, "eval_interval": 40,
        },
    ),
    "classic": Preset("Classic", "The textbook recipe, GPT-2 blocks and AdamW: the same size, minutes instead of seconds.", 180),
    "small": Preset(
        "Bigger",
        "About one million parameters: better verse for more patience.",
        270,
        {
            **MODERN, "vocab_size": 4000, "max_seq_len": 128, "d_model": 128, "n_layers": 3, "d_ff": 512, "batch_size": 16,
            "learning_rate": 0.02, "warmup_steps": 10, "max_steps": 2300, "log_interval": 10, "eval_interval": 100, "dropout": 0.3,
        },
    ),
}  # fmt: skip

DEFAULT_PRESET = "quick"


def expected_seconds(preset: str, config: TransformerConfig) -> float:
    """Estimate a run's time from its preset's, scaled by the numbers that a run has to touch: steps, tokens a step, parameters."""
    base = PRESETS[preset].config()
    return PRESETS[preset].seconds * _work(config) / _work(base)


def _work(config: TransformerConfig) -> float:
    # A fixed cost a step, and one that grows with tokens and parameters: measured to be of equal size near 1e8.
    return config.max_steps * (1e8 + config.batch_size * config.max_seq_len * parameter_count(config))
