"""What an inspection found, as plain data that crosses a process border as JSON. It knows nothing of files."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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

    format: str
    """One of "minigpt", "safetensors", "torch zip", "torch legacy"."""
    made_by: str
    """Who wrote it, in plain words."""
    size_bytes: int
    step: int | None = None
    val_loss: float | None = None
    """Nats per token; finite, or None where it is not recorded."""
    best_val_loss: float | None = None
    config: dict[str, object] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)
    """The model's tensors only: no optimizer, no random state."""
    parameters: int = 0
    """Weights that share their data counted once; stored attention masks not counted."""
    parameters_by_block: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: bool = False
    """Whether every value was read: finite numbers, and checksums where the format has them."""

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain JSON values; it shares its dicts and lists with the report."""
        return {**vars(self), "tensors": [{**vars(tensor), "shape": list(tensor.shape)} for tensor in self.tensors]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Report":
        """Rebuild a report from `to_dict`'s result after a trip through JSON.

        Raises:
            TypeError: A value is not of the kind that `to_dict` writes, or is missing or unknown.
        """
        known = dict(values)
        listed = known.pop("tensors", None)
        if not isinstance(listed, list):
            raise TypeError("tensors")
        for name, kind in _KINDS.items():
            if not isinstance(known.get(name), kind):
                raise TypeError(name)
        return cls(tensors=[_tensor(item) for item in listed], **known)  # type: ignore[arg-type]  # the loop above has checked each kind


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "format": str,
    "made_by": str,
    "size_bytes": int,
    "step": (int, type(None)),
    "val_loss": (float, int, type(None)),
    "best_val_loss": (float, int, type(None)),
    "config": dict,
    "parameters": int,
    "parameters_by_block": dict,
    "metadata": dict,
    "warnings": list,
    "notes": list,
    "checked": bool,
}


def _tensor(values: object) -> TensorInfo:
    if not isinstance(values, dict):
        raise TypeError("tensor")
    name, dtype, shape, size = values.get("name"), values.get("dtype"), values.get("shape"), values.get("size_bytes")
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(size, int):
        raise TypeError("tensor")
    return TensorInfo(name, dtype, tuple(shape), size)
