"""Opens anybody's checkpoint without running it.

No byte of the file is executed, unpickled or trusted: containers are read under strict bounds, a pickle is interpreted as data, and whatever the
file claims is checked against what it holds. `inspect_safely` does this in a child process with limits and is what a server uses. A file that is
refused raises `CheckpointError`. This package imports neither torch nor numpy, so that a look costs a tenth of a second.
"""

from minigpt.inspection.opening import SCAN_LIMIT_BYTES, inspect_file
from minigpt.inspection.report import Report, TensorInfo
from minigpt.inspection.sandbox import inspect_safely

__all__ = ["SCAN_LIMIT_BYTES", "Report", "TensorInfo", "inspect_file", "inspect_safely"]
