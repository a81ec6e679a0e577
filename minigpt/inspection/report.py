"""What an inspection found, as plain data that crosses a process border as JSON. It knows nothing of files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

from minigpt.header import whole_numbers

Kind = TypeVar("Kind", "TensorInfo", "Report")


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
    def from_dict(cls, values: Mapping[str, object]) -> "Report":
        """Rebuild a report from `to_dict`'s result after a trip through JSON; TypeError where a value is missing, unknown or of another kind."""
        listed = values.get("tensors")
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise TypeError("tensors")
        tensors = [_built(TensorInfo, {**item, "shape": whole_numbers(item.get("shape"))}) for item in listed]
        return _built(cls, {**values, "tensors": tensors})


def _built(kind: type[Kind], values: Mapping[str, object]) -> Kind:
    for item in fields(kind):
        if not isinstance(values.get(item.name), getattr(item.type, "__origin__", item.type)):  # dict for dict[str, object]
            raise TypeError(item.name)
    return kind(**values)  # type: ignore[arg-type]  # the loop above has checked each kind
