"""Lion (Chen et al. 2023, algorithm 2): the sign of a mix of gradient and running mean."""

from __future__ import annotations

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})  # both are set before each update
        self.beta1, self.beta2 = beta1, beta2

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:  # exp_avg_sq is not used, but a checkpoint has room for just these two
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                direction = torch.lerp(param.grad, state["exp_avg"], self.beta1).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["exp_avg"].lerp_(param.grad, 1 - self.beta2)
