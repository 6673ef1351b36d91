"""AdamW (Loshchilov and Hutter 2019) with the step count in the parameter group, like apex's FusedAdam.

Megatron's distributed checkpoints expect that contract. The arithmetic is PyTorch's fused kernel. Half-precision
parameters have float32 master weights beside the moments. A share of the parameters may have both in CPU memory, where
the CPU updates them (Ren et al. 2021, ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from rlhpc.backends.kernels.own_optimizer import update_adamw
from rlhpc.parallel import pinned_memory
from rlhpc.plan.estimates.rank_memory import STAGED

MASTER = "master_param"  # Megatron's name (distrib_optimizer.py:904)


class AdamW(torch.optim.Optimizer):
    """Updates at least ``optimizer_offload_fraction`` of the elements, leading whole parameters, on the CPU: set it
    before ``begin``.

    Gradients of half-precision parameters are read from ``decoupled_grad``, as in Megatron's precision-aware
    optimizers: PyTorch requires that ``grad`` has the parameter's type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **modes: bool,
    ) -> None:
        """``modes``: FusedAdam's adam_w_mode and bias_correction, which must be on."""
        assert modes.keys() <= {"adam_w_mode", "bias_correction"}, f"unknown arguments {sorted(modes)}"
        assert all(modes.values()), "only decoupled weight decay with bias correction is implemented"
        self.optimizer_offload_fraction = 0.0
        self.on_cpu: set[Tensor] = set()  # parameters whose state is in CPU memory
        self._slots: list[_Slot] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def begin(self) -> None:
        """Divides the parameters between device and CPU, and allocates their state there.

        Called after Megatron has replaced the parameters by its shards. Loading a checkpoint writes into existing
        state: without it Megatron would allocate all of it on the device.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        leading = leading_share(params, self.optimizer_offload_fraction)
        self.on_cpu = set(leading)
        longest = min(STAGED, max((param.numel() for param in leading), default=0))
        self._slots = [_Slot(longest, leading[0]) for _ in range(2)] if leading else []
        for param in params:
            self.state[param] = {name: self._empty(param).zero_() for name in ("exp_avg", "exp_avg_sq")}
            if param.dtype != torch.float32:
                self.state[param][MASTER] = self._empty(param).copy_(param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # Counted in empty groups too: the common state must be equal on every rank.
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if _gradient(param) is not None]
            device = [param for param in params if param not in self.on_cpu]
            weights = [self.master(param) for param in device]
            self._update(group, weights, [_gradient(param) for param in device], [self.state[p] for p in device])
            masters = [weight is not param for param, weight in zip(device, weights, strict=True)]
            if any(masters):
                torch._foreach_copy_(list(compress(device, masters)), list(compress(weights, masters)))
            self._update_on_cpu(group, [param for param in params if param in self.on_cpu])

    def master(self, param: Tensor) -> Tensor:
        """Float32 weights that the update changes; the parameter itself if it is float32."""
        return self.state[param].get(MASTER, param)

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Returns state for Megatron's checkpoints, as TransformerEngine's FusedAdam (distrib_optimizer.py:903)."""
        return self.state[param][name]

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        """Sets state from Megatron's checkpoints, as TransformerEngine's FusedAdam (distrib_optimizer.py:932)."""
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads like torch's method, but leaves state on its device."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update(saved, params=params)
            for param, index in zip(params, saved["params"], strict=True):
                if index in state_dict["state"]:
                    self.state[param] = state_dict["state"][index]

    def _empty(self, param: Tensor) -> Tensor:
        if param in self.on_cpu:
            return pinned_memory.allocate(4 * param.numel(), param.device).view(torch.float32).view(param.shape)
        return torch.empty_like(param, dtype=torch.float32)

    def _update_on_cpu(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Updates piece by piece; while the CPU updates one, the gradient of the next is copied."""
        pieces = [(p, slice(start, start + STAGED)) for p in params for start in range(0, p.numel(), STAGED)]
        slots = self._slots
        for number in range(len(pieces) + 1):
            if number < len(pieces):
                slots[number % 2].fetch(*pieces[number], with_weight=MASTER not in self.state[pieces[number][0]])
            if number > 0:
                (param, piece), slot = pieces[number - 1], slots[(number - 1) % 2]
                state = {name: value[piece] for name, value in self.state[param].items()}
                gradient, weight = slot.fetched()
                self._update(group, [state.get(MASTER, weight)], [gradient], [state])
                if MASTER in state:
                    weight.copy_(state[MASTER])
                slot.send(param, piece)
        for slot in slots:
            slot.wait()

    def _update(
        self,
        group: dict[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """One update of float32 ``weights``, all on one device."""
        if not weights:
            return
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        update_adamw(group, weights, gradients, means, squares)


class _Slot:
    """Staging buffers for a gradient on its way to the CPU and the weight on its way back; pinned if there is a GPU."""

    def __init__(self, numel: int, like: Tensor) -> None:
        self._gradient = pinned_memory.allocate(4 * numel, like.device).view(torch.float32)
        self._weight = pinned_memory.allocate(like.itemsize * numel, like.device).view(like.dtype)
        self._event = torch.cuda.Event() if like.is_cuda else None
        self._length = 0

    def fetch(self, param: Tensor, piece: slice, *, with_weight: bool) -> None:
        """Starts to copy a piece of the parameter's gradient, and of the weight if it is its own master."""
        self.wait()
        gradient = _gradient(param)[piece]
        self._length = len(gradient)
        self._gradient[: self._length].copy_(gradient, non_blocking=True)
        if with_weight:
            self._weight[: self._length].copy_(param[piece], non_blocking=True)
        self._record()

    def fetched(self) -> tuple[Tensor, Tensor]:
        """(gradient, weight) of the last fetch."""
        self.wait()
        return self._gradient[: self._length], self._weight[: self._length]

    def send(self, param: Tensor, piece: slice) -> None:
        """Starts to copy the weight back."""
        param[piece].copy_(self._weight[: self._length], non_blocking=True)
        self._record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def _record(self) -> None:
        if self._event is not None:
            self._event.record()


def leading_share(tensors: Sequence[Tensor], share: float) -> list[Tensor]:
    """Shortest prefix of the tensors with at least this share of all elements."""
    wanted, held, leading = share * sum(tensor.numel() for tensor in tensors), 0, []
    for tensor in tensors:
        if held >= wanted:
            break
        leading.append(tensor)
        held += tensor.numel()
    return leading


def _gradient(param: Tensor) -> Any:
    return param.grad if param.dtype == torch.float32 else getattr(param, "decoupled_grad", None)
