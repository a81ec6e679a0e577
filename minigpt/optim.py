"""Schedule and optimizers. Knows parameters and gradients, not what they are for."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.95)
# Source: K. Jordan et al., "Muon: an optimizer for hidden layers", 2024: a quintic whose repetition pushes all singular values towards 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_MOMENTUM = 0.85  # less than the usual 0.95: runs of a few hundred steps end 0.04 nats lower with it
WIDE = 64  # from this width on, orthogonalising in bfloat16 gains more than the conversion costs


def get_lr(step: int, warmup_steps: int, max_steps: int, max_lr: float, min_lr: float) -> float:
    """Return the learning rate of update `step`, counted from 0: a straight climb from 0, then a cosine down to `min_lr`.

    Update 0 has rate 0, on purpose. From `max_steps` on the rate is `min_lr`. No input divides by zero.

    Source: Loshchilov and Hutter, "SGDR", 2017, one cycle with a linear warm-up.
    """
    step = max(step, 0)
    if step >= max_steps:
        return min_lr
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (max_lr - min_lr) * (1.0 + math.cos(math.pi * progress))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace each of matrices (N, A, B) by nearly its closest orthogonal matrix, all N at once, in float32 or, where that is faster, bfloat16.

    Source: the Newton-Schulz iteration of Muon, X <- aX + (bS + cS²)X with S = XXᵀ.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.size(1) > matrices.size(2)
    x = (matrices.mT if tall else matrices).to(_product_dtype(matrices))
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def _product_dtype(matrices: Tensor) -> torch.dtype:
    """Return the type for products of matrices (N, A, B): bfloat16 where the hardware has it and they are wide enough to gain by it."""
    return torch.bfloat16 if min(matrices.shape[1:]) >= WIDE and gains_by_bfloat16(matrices.device) else matrices.dtype


def gains_by_bfloat16(device: torch.device) -> bool:
    """Tell whether a model's products are faster in bfloat16: known by the hardware and not timed, so that equal settings give equal runs."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for matrices only; equal shapes are done in one batch, which small models need.

    A group's `parts` tells into how many stacked matrices each parameter falls (3 for queries, keys and values in one).

    Source: K. Jordan et al., 2024, with Nesterov momentum and updates scaled by sqrt(max(1, rows / columns)).
    """

    found_inf: Tensor | None = None  # as torch's fused optimizers have it: 1 makes a step that changes nothing

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = MUON_MOMENTUM, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A closure is not supported."""
        assert closure is None
        skip = self.found_inf
        batches: dict[tuple[int, ...], list[tuple[Tensor, Tensor, dict[str, Any]]]] = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                gradient = parameter.grad if skip is None else torch.where(skip > 0, buffer, parameter.grad)
                buffer.lerp_(gradient, 1.0 - group["momentum"])
                update = gradient.lerp(buffer, group["momentum"])
                update, decay = (update, group["weight_decay"]) if skip is None else (update * (1 - skip), group["weight_decay"] * (1 - skip))
                if group["weight_decay"]:
                    parameter.mul_(1.0 - group["lr"] * decay)
                for part, piece in zip(parameter.chunk(group["parts"]), update.chunk(group["parts"]), strict=True):
                    batches[piece.shape].append((part, piece, group))
        for (rows, columns), batch in batches.items():
            updates = orthogonalise(torch.stack([piece for _, piece, _ in batch]))
            for (part, _, group), update in zip(batch, updates, strict=True):
                part.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


class MuonWithAdamW:
    """Muon for the matrices inside the blocks and AdamW for everything else, behind the interface of one optimizer."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.muon = muon
        self.adamw = adamw

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both, the very dicts that the optimizers read: setting `lr` in them takes effect."""
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        """Update all parameters once."""
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return both states in the shape of one: `state` by parameter number, `param_groups` in order, Muon's first."""
        first, second = self.muon.state_dict(), self.adamw.state_dict()
        shift = sum(len(group["params"]) for group in first["param_groups"])
        moved = [{**group, "params": [number + shift for number in group["params"]]} for group in second["param_groups"]]
        return {
            "state": first["state"] | {number + shift: state for number, state in second["state"].items()},
            "param_groups": first["param_groups"] + moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        count = len(self.muon.param_groups)
        shift = sum(len(group["params"]) for group in self.muon.param_groups)
        moved = [{**group, "params": [number - shift for number in group["params"]]} for group in state["param_groups"][count:]]
        self.muon.load_state_dict({"state": {n: s for n, s in state["state"].items() if n < shift}, "param_groups": state["param_groups"][:count]})
        self.adamw.load_state_dict({"state": {n - shift: s for n, s in state["state"].items() if n >= shift}, "param_groups": moved})


AnyOptimizer = torch.optim.Optimizer | MuonWithAdamW


def configure_optimizer(model: nn.Module, learning_rate: float, weight_decay: float, kind: Literal["adamw", "muon"] = "adamw") -> AnyOptimizer:
    """Make the optimizer: tensors of two or more dimensions decay, biases and norms do not; both counts are logged.

    `kind="muon"` gives the matrices inside `blocks.` to Muon and the rest (embeddings, biases, norms) to AdamW.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    hidden = {name: parameter for name, parameter in named.items() if kind == "muon" and parameter.dim() == 2 and name.startswith("blocks.")}
    rest = [parameter for name, parameter in named.items() if name not in hidden]
    decayed = [parameter for parameter in rest if parameter.dim() >= 2]
    plain = [parameter for parameter in rest if parameter.dim() < 2]
    counts = [(f"{sum(p.numel() for p in part):,}", len(part)) for part in ([*decayed, *hidden.values()], plain)]
    log.info("%s parameters in %d tensors decay; %s in %d do not", *counts[0], *counts[1])
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    device = next(model.parameters()).device.type
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, fused=device in ("cpu", "cuda", "mps"))
    if kind == "adamw":
        return adamw
    fused = [parameter for name, parameter in hidden.items() if name.endswith("qkv.weight")]
    whole = [parameter for name, parameter in hidden.items() if not name.endswith("qkv.weight")]
    return MuonWithAdamW(Muon([{"params": fused, "parts": 3}, {"params": whole}], lr=learning_rate, weight_decay=weight_decay), adamw)


class FiniteGuard:
    """Keeps gradients that are not finite out of the weights without asking the device at each step, which a GPU would have to be waited for.

    From the first bad step on no step changes anything, so that the weights stay the last finite ones however late the fault is read.
    """

    def __init__(self, optimizer: AnyOptimizer, device: torch.device) -> None:
        self.bad = torch.zeros((), device=device)
        self._made = torch.zeros((), dtype=torch.int64, device=device)
        for part in (optimizer.muon, optimizer.adamw) if isinstance(optimizer, MuonWithAdamW) else (optimizer,):
            part.__dict__.update(found_inf=self.bad, grad_scale=None)  # torch's fused optimizers read both

    def judge(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Take note of a step's loss and gradient norm, scalars on the device, before the optimizer's step."""
        self.bad.copy_(torch.maximum(self.bad, (~torch.isfinite(loss.detach() + grad_norm)).float()))
        self._made += self.bad == 0

    def steps_made(self) -> int:
        """Return how many steps changed the weights; this waits for the device."""
        return int(self._made)


def warm_up() -> None:
    """Make torch load what its first optimizer step would load for a second, without touching any random state."""
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros(2, 2)
    configure_optimizer(nn.ParameterDict({"weight": weight}), 0.0, 0.0).step()
