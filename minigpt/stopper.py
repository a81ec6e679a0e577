"""Ctrl-C and SIGTERM on the command line: a graceful stop, at once where somebody insists."""

import os
import threading
from typing import TYPE_CHECKING

from minigpt import system

if TYPE_CHECKING:
    from minigpt.run import Run

ENOUGH_SIGNALS = 3  # the first stops, the second hurries, the third leaves at once


class Stopper:
    """Turns Ctrl-C and SIGTERM into a graceful stop, also of a run that is not there yet."""

    def __init__(self) -> None:
        self.asked = 0
        self.event = threading.Event()  # for a process that has no run of its own
        self.run: Run | None = None

    def watch(self, run: "Run") -> None:
        """Stop this run from now on, at once if a stop has been asked for."""
        asked, self.run = self.asked, run
        for _ in range(asked):
            run.stop.ask()

    def ask(self) -> None:
        """Ask for a stop, from a signal handler.

        Raises:
            KeyboardInterrupt: the patience is at an end.
        """
        self.asked += 1
        if self.asked >= ENOUGH_SIGNALS:
            raise KeyboardInterrupt
        # Not print: the signal may have come in the middle of one, and a stream cannot be entered twice.
        message = "\nstopping and saving; once more skips the final evaluation\n" if self.asked == 1 else "\nsaving\n"
        self.event.set()
        if system.rank() == 0:
            os.write(2, message.encode())
        if self.run is not None:
            self.run.stop.ask()  # no more: the code that the signal interrupted may hold the lock of the run's state
