"""What a pickle is made of once nothing in it may act: records of its objects, and the few calls of honest checkpoints as plain functions.

Each function here takes what the file passed to a call of that name and returns a record. None looks the name up, and none trusts an argument.
"""

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from minigpt.errors import CheckpointError
from minigpt.inspection.tensors import DTYPE_NAMES, Tensor


@dataclass(slots=True, eq=False, repr=False)
class GlobalName:
    """A class or function that the file names; only ever a name here."""

    full: str


@dataclass(slots=True, eq=False, repr=False)
class PickledDict:
    """A dict as its pairs, in order and unhashed: a key may be anything, and may come twice."""

    pairs: list[tuple[object, object]] = field(default_factory=list)

    def get(self, key: str, default: object = None) -> object:
        """Return the last value stored under the text `key`, as a dict would have it."""
        return next((value for name, value in reversed(self.pairs) if type(name) is str and name == key), default)


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An object of any class, as the plain data it would have been filled with."""

    class_name: str
    arguments: tuple[object, ...] = ()
    pairs: list[tuple[object, object]] = field(default_factory=list)
    items: list[object] = field(default_factory=list)
    state: object = None


@dataclass(slots=True, eq=False, repr=False)
class NumpyType:
    """The dtype of a pickled numpy scalar, such as "f8"."""

    code: object
    byte_order: str = "<"


Contents = list[object] | tuple[object, ...] | list[tuple[object, object]]
Call = Callable[[tuple[object, ...]], object]


def contents(value: object) -> Contents:
    """Return the members of a pickled list, tuple or dict, and nothing for any other value."""
    if isinstance(value, PickledDict):
        return value.pairs
    return value if isinstance(value, (list, tuple)) else ()


def whole_number(value: object) -> int:
    """Return `value` if it is an int of at most 64 bits; anything else is damage."""
    if type(value) is not int or value.bit_length() > 64:
        raise ValueError("not a number of sane size")
    return value


def text(value: object) -> str:
    """Return `value` if it is text; anything else is damage."""
    if not isinstance(value, str):
        raise TypeError("not text")
    return value


def _tensor(arguments: tuple[object, ...]) -> object:
    storage, offset, shape, stride = arguments[:4]
    # The third version names its dtype, because its storage is bare bytes; the others take the storage's.
    kind = arguments[6] if len(arguments) > 6 else None
    return Tensor(storage, offset, shape, stride, DTYPE_NAMES[kind.full] if isinstance(kind, GlobalName) else None)


def _mapping(arguments: tuple[object, ...]) -> object:
    source = contents(arguments[-1]) if arguments else ()
    return PickledDict([(pair[0], pair[1]) for pair in source if isinstance(pair, (list, tuple)) and len(pair) == 2])


def _encoded(arguments: tuple[object, ...]) -> object:
    # How the older protocols write bytes. Only numpy's scalars matter; anything longer is named and not made, since one long text could be
    # encoded thousands of times over.
    characters, encoding = arguments
    if encoding != "latin1":
        raise CheckpointError("This file asks for a text encoding that is not allowed (a call of _codecs.encode). It was not run.")
    size = len(text(characters))
    return text(characters).encode("latin1") if size <= 64 else f"({size:,} bytes)"


def _numpy_scalar(arguments: tuple[object, ...]) -> object:
    dtype, data = arguments
    code = dtype.code if isinstance(dtype, NumpyType) and isinstance(dtype.code, str) else ""
    if not isinstance(dtype, NumpyType) or not isinstance(data, bytes) or code not in _NUMPY_CODES:
        return "(a numpy value)"
    return struct.unpack(dtype.byte_order + _NUMPY_CODES[code], data)[0]


def _first(arguments: tuple[object, ...]) -> object:
    return arguments[0] if arguments else ()


def _path(arguments: tuple[object, ...]) -> object:
    return "/".join(part[:200] for part in arguments[:50] if isinstance(part, str))


def _reconstructed(arguments: tuple[object, ...]) -> object:
    return Record(arguments[0].full if isinstance(arguments[0], GlobalName) else "?")


_NUMPY_CODES = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}
TENSOR_CALLS: Mapping[str, Call] = {
    **dict.fromkeys((f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")), _tensor),
    **dict.fromkeys(("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"), _first),
}
KNOWN_CALLS: Mapping[str, Call] = {
    **TENSOR_CALLS,
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict"), _mapping),
    **dict.fromkeys(("torch.Size", "builtins.tuple", "builtins.list", "builtins.set", "builtins.frozenset", "torch.device"), _first),
    **dict.fromkeys((f"pathlib.{kind}Path" for kind in ("", "Posix", "Windows", "PurePosix", "PureWindows")), _path),
    **dict.fromkeys((f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")), _numpy_scalar),
    "numpy.dtype": lambda arguments: NumpyType(_first(arguments)),
    "_codecs.encode": _encoded,
    "copyreg._reconstructor": _reconstructed,
    "types.SimpleNamespace": lambda _: Record("types.SimpleNamespace"),
    "torch.serialization._get_layout": lambda _: None,
}
REFUSED_TENSORS = re.compile(r"torch\.(?:_utils|_tensor)\._rebuild_(.*)")
"""Rebuilding calls outside `TENSOR_CALLS`: sparse, nested, quantized, meta. Their contents cannot be checked by shape and stride alone."""
TELLING_CALLS = re.compile(
    r"(builtins\.(eval|exec|compile|open|getattr|__import__|breakpoint)|os\.|posix\.|nt\.|subprocess|sys\.|socket|shutil|runpy|importlib"
    r"|torch\.hub|torch\.load|pickle|ctypes|webbrowser|pty)"
)
"""Calls that say most about a file's intent; where a file makes several, one of these is named. Not a gate: every unknown call is refused."""
