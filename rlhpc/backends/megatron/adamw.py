"""AdamW (Loshchilov and Hutter 2019) with the step count in the parameter group, as apex's FusedAdam keeps it.

Megatron's distributed checkpoints are written for that contract. The arithmetic is PyTorch's own fused kernel. A share
of the parameters may have its moments in host memory, where the CPU updates it (Ren et al. 2021, ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_HOST = torch.device("cpu")


class AdamW(torch.optim.Optimizer):
    """``host_fraction`` of the elements, whole parameters in their order, are the host's: set it before ``begin``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        assert adam_w_mode, "only decoupled weight decay is built"
        assert bias_correction, "only bias correction is built"
        self.host_fraction = 0.0
        self._on_host: set[Tensor] = set()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def begin(self) -> None:
        """Share the parameters out and make their moments, where they are to stay.

        Called when Megatron has put its shards in the place of the parameters. Moments that exist are what a load
        writes into: without them it would make all of them on the device.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        self._on_host = set(leading_share(params, self.host_fraction))
        for param in params:
            self.state[param] = {name: self._zeros(param) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # Counted in empty groups too: every rank must save the same common state.
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            device = [param for param in params if param not in self._on_host]
            self._update(group, device, device, [param.grad for param in device])
            self._update_on_host(group, [param for param in params if param in self._on_host])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's own, but moments stay on the device that they are on."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update(saved, params=params)
            for param, index in zip(params, saved["params"], strict=True):
                if index in state_dict["state"]:
                    self.state[param] = state_dict["state"][index]

    def _zeros(self, param: Tensor) -> Tensor:
        if param in self._on_host:
            return torch.zeros_like(param, device=_HOST, pin_memory=param.is_cuda)
        return torch.zeros_like(param)

    def _update_on_host(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Weights and gradients come over, the new weights go back."""
        weights, gradients = _to_host(params), _to_host([param.grad for param in params])
        if params and params[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._update(group, params, weights, gradients)
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight, non_blocking=True)

    def _update(
        self, group: dict[str, Any], params: Sequence[Tensor], weights: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """One update of ``weights`` with the moments of ``params``, all on one device."""
        if not params:
            return
        # The kernel adds one to each count it is given, and wants one of its own for every parameter.
        before = [torch.tensor(float(group["step"] - 1), device=weight.device) for weight in weights]
        adamw(
            weights,
            gradients,
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            before,
            foreach=False,
            fused=True,
            capturable=False,
            differentiable=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def leading_share(tensors: Sequence[Tensor], share: float) -> list[Tensor]:
    """The first tensors, as many as it takes to hold at least this share of all elements."""
    wanted, held, chosen = share * sum(tensor.numel() for tensor in tensors), 0, []
    for tensor in tensors:
        if held >= wanted:
            break
        chosen.append(tensor)
        held += tensor.numel()
    return chosen


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to(_HOST, copy=True, non_blocking=True) for tensor in tensors]
