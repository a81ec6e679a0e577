"""`python -m minigpt`: the environment first, then the command line."""

import os
import signal

if __name__ == "__main__":
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # and not ignored, as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing has begun

from minigpt.system import prepare_environment

if __name__ == "__main__":
    prepare_environment()
    from minigpt.cli import main

    signal.signal(signal.SIGINT, usual)
    raise SystemExit(main())
