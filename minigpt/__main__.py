"""`python -m minigpt`: the environment first, then the command line."""

import os
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing has begun

from minigpt.system import prepare_environment

if __name__ == "__main__":
    prepare_environment()
    from minigpt.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
