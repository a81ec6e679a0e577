"""Every setting of a run, declared once: type, default, legal range, slider range, label and help.

The form, the command line's flags, the validation and the README's table are made from these declarations. Nothing here knows torch, the page or
a file: importing it costs milliseconds. `TransformerConfig()` is the preset `classic`; the page and the command line start at `quick`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from minigpt.errors import ConfigError

Group = Literal["model", "training", "files"]
Slider = tuple[float, float, float]  # lowest, highest, step

SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(4)
TEMPERATURE, TOP_K = 0.8, 50  # with which is written where nobody says otherwise
MAX_PARAMETERS = 100_000_000  # beyond it a single step takes minutes on a CPU, and Stop can only act between steps


def setting(
    default: Any, label: str, description: str, group: Group, *, ge: float | None = None, le: float | None = None, slider: Slider | None = None
) -> Any:
    """Declare one setting; the range is both checked and written into the help text.

    Args:
        default: value of the preset `classic`.
        label: the plain name on the page.
        description: one sentence for a newcomer.
        group: the part of the form it stands in; "files" settings are for the command line alone.
        ge: lowest legal value.
        le: highest legal value.
        slider: range and step on the page, inside the legal range; None gives a number field.
    """
    text = description if ge is None or le is None else f"{description} ({number(ge)} to {number(le)})"
    return Field(
        default,
        ge=ge,
        le=le,
        allow_inf_nan=False if ge is not None else None,
        title=label,
        description=text,
        json_schema_extra={"group": group, "slider": list(slider) if slider else None},
    )


def number(value: float) -> str:
    """Write a number as a person would: no exponent for the usual sizes, thousands apart."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:g}"


class TransformerConfig(BaseModel):
    """The settings of one run. Assignment is validated; rules that join several fields are checked by `problems()`."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", protected_namespaces=())

    arch: Literal["gpt2", "modern"] = setting(
        "gpt2", "Architecture", "gpt2: the classic blocks. modern: RMSNorm, rotary positions, QK-norm, ReLU².", "model"
    )
    tokenizer: Literal["word", "char"] = setting(
        "word", "Tokens", "What the model reads and writes one at a time: whole words or single characters.", "model"
    )
    vocab_size: int = setting(
        2000,
        "Vocabulary",
        "How many different tokens the model may know; rarer ones become “unknown”.",
        "model",
        ge=5,
        le=100_000,
        slider=(100, 8000, 100),
    )
    max_seq_len: int = setting(64, "Context length", "How many tokens the model looks back.", "model", ge=2, le=4096, slider=(8, 256, 8))
    d_model: int = setting(32, "Width", "Numbers per token inside the model.", "model", ge=2, le=8192, slider=(16, 256, 8))
    n_heads: int = setting(4, "Heads", "Attention heads per layer; must divide the width.", "model", ge=1, le=128, slider=(1, 16, 1))
    n_layers: int = setting(2, "Layers", "Blocks on top of each other.", "model", ge=1, le=128, slider=(1, 12, 1))
    d_ff: int = setting(
        128, "Inner width", "Width of the feed-forward part, usually four times the width.", "model", ge=1, le=65_536, slider=(32, 1024, 32)
    )
    dropout: float = setting(
        0.1, "Dropout", "Share of activations silenced at random while training.", "model", ge=0.0, le=0.9, slider=(0.0, 0.5, 0.05)
    )

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "Optimizer", "adamw: the usual one. muon: orthogonalised updates for the matrices, AdamW for the rest.", "training"
    )
    max_steps: int = setting(5000, "Steps", "Updates of the weights.", "training", ge=1, le=10_000_000)
    max_epochs: int | None = setting(
        None, "Epochs", "Stop after this many passes over the text; empty means no limit.", "training", ge=1, le=1_000_000
    )
    batch_size: int = setting(64, "Batch", "Pieces of text read per step.", "training", ge=1, le=4096, slider=(1, 128, 1))
    learning_rate: float = setting(3e-4, "Learning rate", "Size of each update at its highest.", "training", ge=1e-8, le=10.0)
    min_lr: float = setting(3e-5, "Final learning rate", "What the rate falls to along a cosine.", "training", ge=0.0, le=10.0)
    warmup_steps: int = setting(200, "Warm-up", "Steps in which the rate climbs from 0.", "training", ge=0, le=1_000_000)
    weight_decay: float = setting(0.1, "Weight decay", "Pull of the matrices towards 0.", "training", ge=0.0, le=10.0, slider=(0.0, 0.5, 0.01))
    grad_clip: float = setting(1.0, "Gradient clip", "Longest gradient let through; 0 switches clipping off.", "training", ge=0.0, le=1000.0)
    eval_interval: int = setting(500, "Evaluate every", "Steps between validation losses.", "training", ge=1, le=10_000_000)
    log_interval: int = setting(50, "Log every", "Steps between points of the training curve.", "training", ge=1, le=1_000_000)
    patience: int = setting(0, "Patience", "Stop after this many evaluations without a new best; 0 means never.", "training", ge=0, le=100_000)
    seed: int = setting(1337, "Seed", "Same seed, same run.", "training", ge=0, le=2**32 - 1)
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "Device", "Where the numbers are crunched; auto takes the fastest.", "training")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Precision", "Numbers of the matrix products while training; auto takes bfloat16 where that is faster.", "training"
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto", "Compile", "Compile the model beside the training, for faster steps later; auto does so on a GPU alone.", "training"
    )
    threads: int = setting(0, "Threads", "CPU threads; 0 takes one, or two where a trial shows that they help.", "training", ge=0, le=256)

    data_path: str = setting(
        "", "Text file", "UTF-8 text to learn from; empty means Tiny Shakespeare, or the built-in plays without a network.", "files"
    )
    vocab_path: str = setting("", "Vocabulary file", "Where to write the tokenizer apart; empty means only inside the checkpoints.", "files")
    checkpoint_dir: str = setting("checkpoints", "Run folder", "Folder that receives the checkpoints.", "files")
    checkpoint_path: str = setting("", "Best checkpoint", "Empty means best.safetensors in the run folder.", "files")

    @model_validator(mode="after")
    def _follow_folder(self) -> Self:
        # Written straight into __dict__: an assignment would validate again, without end, and mark the field as chosen by the caller.
        if not self.checkpoint_path:
            self.model_fields_set.discard("checkpoint_path")
        if "checkpoint_path" not in self.model_fields_set:
            self.__dict__["checkpoint_path"] = str(Path(self.checkpoint_dir) / "best.safetensors")
        return self

    def _head_advice(self) -> str | None:
        """Return what to try if the heads do not fit the width, or None if they do; rotary positions also need an even width of each."""
        need = 2 if self.arch == "modern" else 1
        if self.d_model % (need * self.n_heads) == 0:
            return None
        fitting = [n for n in range(1, min(self.d_model, 128) + 1) if self.d_model % (need * n) == 0]
        wider = -(-self.d_model // (need * self.n_heads)) * need * self.n_heads
        return str(min(fitting, key=lambda n: abs(n - self.n_heads))) if fitting else f"d_model {wider}"

    def _narrower(self) -> int:
        """Return a width at which the model is small enough."""
        width = self.d_model
        while width > 2 * self.n_heads and parameter_count(self.model_copy(update={"d_model": width})) > MAX_PARAMETERS:
            width = max(width // 2 // (2 * self.n_heads), 1) * 2 * self.n_heads
        return width

    def problems(self) -> list[str]:
        """List what no single field can know, one sentence each; an empty list means the settings fit each other."""
        found = []
        if (advice := self._head_advice()) is not None:
            even = " into even parts" if self.arch == "modern" else ""
            found.append(f"n_heads is {self.n_heads}; it must divide d_model, {self.d_model}{even}: try {advice}")
        if self.warmup_steps >= self.max_steps:
            found.append(f"warmup_steps is {self.warmup_steps:,}; it must be below max_steps, {self.max_steps:,}: try {self.max_steps // 10}")
        if self.min_lr > self.learning_rate:
            found.append(f"min_lr is {self.min_lr:g}; it must not exceed learning_rate, {self.learning_rate:g}: try {self.learning_rate / 10:g}")
        if (size := parameter_count(self)) > MAX_PARAMETERS:
            found.append(f"this model would have {size:,} parameters; at most {MAX_PARAMETERS:,} are allowed: try d_model {self._narrower()}")
        return found

    def check(self) -> None:
        """Raise for settings that do not fit each other.

        Raises:
            ConfigError: with every problem, one sentence a line.
        """
        if found := self.problems():
            raise ConfigError("\n".join(found))


def parameter_count(config: TransformerConfig) -> int:
    """Count the trainable numbers of the model that `config` describes, the tied head once."""
    C, F, V = config.d_model, config.d_ff, config.vocab_size
    matrices = 4 * C * C + 2 * C * F
    if config.arch == "modern":
        return V * C + config.n_layers * matrices
    biases = 4 * C + F + C
    return V * C + config.max_seq_len * C + config.n_layers * (matrices + biases + 4 * C) + 2 * C


def fields(group: Group) -> dict[str, FieldInfo]:
    """Return the declared settings of one group, in the order of the form."""
    return {name: field for name, field in TransformerConfig.model_fields.items() if extra(field)["group"] == group}


def extra(field: FieldInfo) -> dict[str, Any]:
    """Return the page's part of a declaration: its group and slider."""
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)


def parse_config(values: Mapping[str, object], *, strict: bool = True) -> TransformerConfig:
    """Build checked settings from what a form, an API call or a flag supplies.

    Args:
        values: settings by name; missing ones take the defaults of `classic`.
        strict: no silent conversion ("9", True or 2.5 for an integer are refused), as for pages and API.

    Raises:
        ConfigError: with every problem, one sentence a line.
    """
    try:
        config = TransformerConfig.model_validate(dict(values), strict=strict)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error))) from None
    config.check()
    return config


def sentences(error: ValidationError) -> list[str]:
    """Turn pydantic's findings into sentences: the field, the value found, what is allowed, what to try."""
    return [_sentence(str(item["loc"][0]) if item["loc"] else "", item["type"], item["input"]) for item in error.errors()]


def _sentence(name: str, kind: str, value: object) -> str:
    field = TransformerConfig.model_fields.get(name)
    if field is None:
        return f"{name or 'this'} is not a setting; the settings are {', '.join(TransformerConfig.model_fields)}"
    found = "empty" if value is None or value == "" else f"{str(value)[:40]!r}" if isinstance(value, str) else _shown(value)
    allowed, usual = _allowed(field)
    return f"{name} is {found}; it must be {allowed}: try {usual}"


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return str(value)[:40]


def _allowed(field: FieldInfo) -> tuple[str, str]:
    """Describe the legal values of a field, and name a usual one."""
    choices = getattr(field.annotation, "__args__", ())
    if field.annotation is str:
        return "text", repr(field.default)
    low = next((m.ge for m in field.metadata if getattr(m, "ge", None) is not None), None)
    high = next((m.le for m in field.metadata if getattr(m, "le", None) is not None), None)
    if low is None or high is None:
        return "one of " + ", ".join(map(str, choices)), field.default
    kind = "a number" if field.annotation is float else "a whole number"
    return f"{kind} from {number(low)} to {number(high)}", number(field.default if field.default is not None else low)
