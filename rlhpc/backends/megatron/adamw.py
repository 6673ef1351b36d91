"""AdamW (Loshchilov and Hutter 2019) with the step count in the parameter group, as apex's FusedAdam keeps it.

Megatron's distributed checkpoints are written for that contract. The arithmetic is PyTorch's own fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw


class AdamW(torch.optim.Optimizer):
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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # Counted in empty groups too: every rank must save the same common state.
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        # The kernel adds one to each count it is given, and wants one of its own for every parameter.
        before = [torch.tensor(float(group["step"] - 1), device=param.device) for param in params]
        adamw(
            params,
            [param.grad for param in params],
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
