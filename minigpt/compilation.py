"""A compiled forward pass, made beside the training that waits for it to be ready: neither the first point nor Stop waits for the compiler.

With dropout a compiled run is not repeatable, for the compiler draws its masks in another way; without, losses agree to rounding.
"""

import copy
import logging
import threading

import torch

from minigpt.config import TransformerConfig
from minigpt.model import MiniGPT

log = logging.getLogger(__name__)


def is_wanted(config: TransformerConfig, device: torch.device) -> bool:
    """Tell whether to compile: as asked for, else on a GPU alone. A CPU gains a fifth after up to half a minute, when short runs have ended."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


class Compilation:
    """A compilation of one model's forward pass for batches (B, T), on a thread of its own."""

    def __init__(self, model: MiniGPT, shape: tuple[int, int]) -> None:
        self._model = model
        self._twin = copy.deepcopy(model)  # same code, own gradients; a copy draws no random numbers
        self._x = torch.zeros(shape, dtype=torch.int64, device=model.embedding.weight.device)
        self._forward = torch.compile(MiniGPT.hidden)
        self.error = "broke off"  # until it is done
        self._threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._work, name="compile", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # which is part of what is compiled
        try:
            self._forward(self._twin, self._x).sum().backward()
            self.error = ""
        except (RuntimeError, OSError, ImportError) as error:  # no compiler, or one too old: the run goes on as it was
            self.error = type(error).__name__
            log.warning("the model could not be compiled (%s); training goes on without", str(error).partition("\n")[0][:200])

    def news(self) -> str:
        """Put the compiled pass to use once it is ready; return a sentence then, or "" while there is nothing to say."""
        if self.thread.is_alive():
            return ""
        if self.error:
            return f"could not compile ({self.error}); training goes on as before"
        self._model.compiled = self._forward
        return "compiled; steps are faster from here on"
