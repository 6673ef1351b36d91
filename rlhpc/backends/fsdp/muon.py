"""Muon (Jordan et al. 2024): momentum of matrices is orthogonalized, each matrix whole on one rank meanwhile.

An update is lr x 0.2 sqrt(max(m, n)) times the orthogonalized matrix (Liu et al. 2025, arXiv 2502.16982, section 2.2):
its root mean square is that usual of AdamW's updates, so that AdamW's learning rates apply. AdamW itself updates
all other parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlhpc.backends.fsdp.matrices import Matrix, MatrixOwners
from rlhpc.backends.fsdp.sharded_model import local_part
from rlhpc.backends.kernels.own_optimizer import update_adamw
from rlhpc.sharding.mesh_sizes import held_rows

Group = dict[str, Any]
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_TINY = 1e-7
_USUAL = 0.2  # root mean square of AdamW's updates, in learning rates


class Muon(torch.optim.Optimizer):
    """AdamW, and Muon for matrices. At most one of the parameter groups has ``muon``; ``matrices`` has those of its
    parameters.

    ``group``: the ranks of a copy of the weights. ``device`` computes on matrices. State has its parameter's shape and
    shards; AdamW's step is in its group.
    """

    def __init__(
        self,
        params: list[Group],
        matrices: Mapping[Tensor, tuple[Matrix, ...]],
        group: dist.ProcessGroup,
        device: torch.device,
        **defaults: Any,
    ) -> None:
        super().__init__(params, {"muon": False, "step": 0, **defaults})
        self._shards, self._index = group.size(), group.rank()
        self.matrices = {matrix: parameter for parameter, some in matrices.items() for matrix in some}
        self._owners = MatrixOwners(self.matrices, group, device)
        for some in self.param_groups:
            names = ("momentum_buffer",) if some["muon"] else ("exp_avg", "exp_avg_sq")
            for parameter in some["params"]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in names}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Collective over the ranks of a copy of the weights."""
        for group in self.param_groups:
            (self._step_matrices if group["muon"] else self._step_others)(group)

    def _step_matrices(self, group: Group) -> None:
        momentum, decay = group["momentum"], 1 - group["lr"] * group["weight_decay"]
        for parameter in group["params"]:
            local_part(self.state[parameter]["momentum_buffer"]).mul_(momentum).add_(local_part(parameter.grad))
            local_part(parameter).mul_(decay)

        def read(matrix: Matrix) -> Float[Tensor, " held"]:
            """This rank's part of the direction that is orthogonalized."""
            parameter = self.matrices[matrix]
            mean = self._held(matrix, self.state[parameter]["momentum_buffer"])
            if not group["nesterov"]:
                return mean
            return self._held(matrix, parameter.grad).add(mean, alpha=momentum)

        def compute(direction: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
            return orthogonalize(direction, group["ns_steps"]).mul_(_USUAL * sqrt(max(direction.shape)))

        def write(matrix: Matrix, update: Float[Tensor, " held"]) -> None:
            views = self._views(matrix, self.matrices[matrix])
            for view, part in zip(views, update.split([view.numel() for view in views]), strict=True):
                view.sub_(part.view(view.shape).to(view.device), alpha=group["lr"])

        self._owners.run(read, compute, write)

    def _step_others(self, group: Group) -> None:
        """AdamW, as of torch, on this rank's shards."""
        group["step"] += 1
        states = [self.state[parameter] for parameter in group["params"]]
        weights = [local_part(parameter) for parameter in group["params"]]
        gradients = [local_part(parameter.grad) for parameter in group["params"]]
        means, squares = ([local_part(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        update_adamw(group, weights, gradients, means, squares)

    def _held(self, matrix: Matrix, tensor: Tensor) -> Float[Tensor, " held"]:
        """This rank's part of a matrix in a tensor of its parameter's shape, row by row."""
        views = self._views(matrix, tensor)
        return torch.cat([view.reshape(-1) for view in views]) if views else local_part(tensor).new_empty(0)

    def _views(self, matrix: Matrix, tensor: Tensor) -> list[Float[Tensor, "rows n"]]:
        local = local_part(tensor)
        first = held_rows(matrix.size, self._shards, self._index).start
        rows = matrix.held(self._shards, self._index)
        if matrix.index is not None:
            local, first = local[matrix.index - first] if rows else local, 0
        columns = slice(matrix.columns.start, matrix.columns.stop, matrix.columns.step)
        return [local[some.start - first : some.stop - first, columns] for some in rows]


def orthogonalize(matrix: Float[Tensor, "m n"], steps: int) -> Float[Tensor, "m n"]:
    """Moves all singular values towards 1 by Newton-Schulz steps of fifth degree, in float32.

    In bfloat16 a gradient's last bit, which depends on the layout, would change updates by more than 1e-3.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
