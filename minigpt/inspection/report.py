"""What an inspection found, as plain data that crosses a process border as JSON. It knows nothing of files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Any, get_type_hints


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the model: its name is already safe to show, its size is that of the shape in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything known about a file that was opened without running it.

    Texts in `made_by`, `config`, `warnings`, `notes` and tensor names are safe to show as text (not as HTML). `metadata` holds what MiniGPT
    itself wrote, as found: pass its texts through `clean` before showing them.
    """

    format: str  # one of "minigpt", "safetensors", "torch zip", "torch legacy"
    made_by: str  # who wrote it, in plain words
    size_bytes: int
    step: int | None = None
    val_loss: float | None = None  # nats per token; finite, or None where it is not recorded
    best_val_loss: float | None = None
    config: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # of each setting: "stored", "inferred from shapes", or "unknown" and its value None
    fingerprint: str = ""  # of the names and shapes of what was counted, without prefixes: equal for two files of the same shape
    tensors: list[TensorInfo] = field(default_factory=list)  # the model's only: no optimizer, no random state
    parameters: int = 0  # weights that share their data counted once; stored attention masks not counted
    parameters_by_block: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: bool = False  # whether every value was read: finite numbers, and checksums where the format has them

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain JSON values; it shares its dicts and lists with the report."""
        return {**vars(self), "tensors": [{**vars(tensor), "shape": list(tensor.shape)} for tensor in self.tensors]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """Rebuild a report from `to_dict`'s result after a trip through JSON; TypeError, ValueError or KeyError for anything else."""
        for name, hint in get_type_hints(cls).items():
            kind: Any = hint.__origin__ if isinstance(hint, GenericAlias) else hint
            if not isinstance(values.get(name), kind):
                raise TypeError(name)
        tensors = [TensorInfo(str(it["name"]), str(it["dtype"]), tuple(map(int, it["shape"])), int(it["size_bytes"])) for it in values["tensors"]]
        return cls(**{**values, "tensors": tensors})
