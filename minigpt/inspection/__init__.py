"""Opens anybody's checkpoint without running it.

No byte of the file is executed, unpickled or trusted: containers are read under strict bounds, a pickle is interpreted as data, and whatever the
file claims is checked against what it holds. A refusal is a `CheckpointError`. Neither torch nor numpy is imported: a look costs a tenth of a second.
"""

from minigpt.inspection.opening import inspect_file, inspect_parts, inspect_safely
from minigpt.inspection.report import Report, TensorInfo

__all__ = ["Report", "TensorInfo", "inspect_file", "inspect_parts", "inspect_safely"]
