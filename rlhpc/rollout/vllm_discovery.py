"""Discovers an engine's layout by loading coded tensors through vLLM's own loader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.rollout.discovered_layout import (
    SENTINEL,
    Code,
    CodePass,
    DiscoveredLayout,
    Positions,
    Probe,
    Read,
    Transformed,
    View,
    layout_of,
)
from rlhpc.sharding.shards import Shard, TensorSpec

Load = Callable[[Iterator[tuple[str, Tensor]]], None]
_LONGEST_REASON = 300  # letters of vLLM's message
_ROUNDS = 4  # of refinement
_SEED = 20260101


@torch.no_grad()
def discover_layout(
    parameters: Mapping[str, Tensor],
    load: Load,
    tensors: Sequence[TensorSpec],
    dtype: torch.dtype,
    buffers: Mapping[str, Tensor] | None = None,
) -> DiscoveredLayout:
    """Places that ``load`` writes blocks of tensors to, in ``parameters``, whose values are lost, and in ``buffers``,
    which keep theirs if nothing is loaded into them.

    Loads all tensors several times, each whole once at a time: for each digit of their numbers and coordinates twice,
    and once with random values, which every element of the parameters must have. Raises UserError for a parameter that
    is not made up of blocks of tensors.
    """
    buffers = buffers or {}
    kept = {name: own.clone() for name, own in buffers.items()}
    parameters = {**parameters, **buffers}
    device = next(iter(parameters.values())).device
    source = _Source(tensors, dtype, device)
    load = functools.partial(_load_or_refuse, load)
    probes = {name: Probe(name, tuple(own.shape), tensors) for name, own in parameters.items()}
    unsettled = list(probes.values())
    for _ in range(_ROUNDS):
        _take(unsettled, source.read(parameters, load, {p.name: p.lines() for p in unsettled}), Probe.take_lines)
        _take(unsettled, source.read(parameters, load, {p.name: p.corners() for p in unsettled}), Probe.take_corners)
        wrong = source.contradictions(parameters, load, probes.values())
        if not wrong:
            break
        unsettled = [probes[name] for name in wrong]
        for name, position in wrong.items():
            probes[name].refine(position)
    else:
        raise _transformed(next(iter(wrong)))
    for name, own in kept.items():
        if not probes[name].loaded:
            buffers[name].copy_(own)
    untouched = [name for name, probe in probes.items() if not probe.loaded and name not in buffers]
    if untouched:
        raise UserError(
            f"no tensor of the model is loaded into vLLM's parameter {untouched[0]!r}",
            where="rollout",
            remedy="use a model whose weights vLLM loads as they are trained",
        )
    layout = layout_of((probe for probe in probes.values() if probe.loaded), tensors)
    return _as_held(layout, parameters, dtype)


def _load_or_refuse(load: Load, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Raises a UserError if vLLM's loader fails on the model's weights."""
    try:
        load(tensors)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"vLLM's loader rejects weights of the model ({type(error).__name__}: {str(error)[:_LONGEST_REASON]})",
            where="rollout",
            remedy="use a model that the installed vLLM serves",
        ) from error


def _as_held(layout: DiscoveredLayout, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> DiscoveredLayout:
    """The layout, whose float32 tensors are those that parameters hold in float32. Raises UserError for a parameter of
    a smaller dtype than the model's."""

    def as_held(shard: Shard) -> Shard:
        view = layout.views.get(shard.local_name)
        name = view.parameter if view else shard.local_name
        held = parameters[name].dtype
        if held.itemsize < dtype.itemsize:
            held_as, of = (str(each).removeprefix("torch.") for each in (held, dtype))
            raise UserError(
                f"vLLM has the parameter {name!r} in {held_as} in a model of {of}",
                where="model.dtype",
                remedy=f"set it to {held_as}",
            )
        float32 = shard.tensor.float32 and held == torch.float32
        return replace(shard, tensor=replace(shard.tensor, float32=float32))

    return replace(layout, shards=tuple(map(as_held, layout.shards)))


class _Source:
    """Loads coded and random tensors, one at a time."""

    def __init__(self, tensors: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._code = Code(tensors, str(dtype).removeprefix("torch."))

    def read(
        self, parameters: Mapping[str, Tensor], load: Load, points: Mapping[str, Positions]
    ) -> Mapping[str, Read | None]:
        """Contents of each parameter at the points; None if they are no element of a tensor."""
        values: dict[str, list[np.ndarray]] = {name: [] for name in points}
        for code_pass in self._code.passes:
            _blank(parameters)
            load(self._coded(code_pass))
            for name, places in points.items():
                found = parameters[name][tuple(torch.from_numpy(places.T).to(self._device))]
                values[name].append(found.reshape(-1).double().cpu().numpy())
        return {name: self._decoded(np.stack(own)) for name, own in values.items()}

    def contradictions(
        self, parameters: Mapping[str, Tensor], load: Load, probes: Collection[Probe]
    ) -> dict[str, tuple[int, ...]]:
        """The first position of each parameter with another value than its probe predicts for random tensors."""
        _blank(parameters)
        load((tensor.name, self._random(number)) for number, tensor in enumerate(self._tensors))
        wrong = {probe.name: at for probe in probes if (at := probe.contradiction) is not None}
        for probe in probes:
            if probe.padded and probe.name not in wrong:
                _note(wrong, probe.name, _unexplained(parameters[probe.name], probe))
        by_tensor: dict[TensorSpec, list[tuple[Probe, int]]] = {}
        for probe in probes:
            for index, shard in enumerate(probe.shards):
                by_tensor.setdefault(shard.tensor, []).append((probe, index))
        for number, tensor in enumerate(self._tensors):
            touch("finding vLLM's layout")
            whole = self._random(number) if tensor in by_tensor else None
            for probe, index in by_tensor.get(tensor, ()):
                assert whole is not None
                shard, parameter = probe.shards[index], parameters[probe.name]
                expected = whole[shard.box.slices].to(parameter.dtype)
                found = viewed(parameter, probe.views.get(shard.local_name))[shard.local_box.slices]
                differs = found != expected.reshape(found.shape)
                if probe.name not in wrong and differs.any():
                    whole_mask = torch.zeros_like(parameter, dtype=torch.bool)
                    viewed(whole_mask, probe.views.get(shard.local_name))[shard.local_box.slices] = differs
                    _note(wrong, probe.name, whole_mask)
        return wrong

    def _coded(self, code_pass: CodePass) -> Iterator[tuple[str, Tensor]]:
        for number, tensor in enumerate(self._tensors):
            touch("finding vLLM's layout")
            values = torch.from_numpy(self._code.values(number, code_pass)).to(self._device, self._dtype_of(tensor))
            line = [1] * len(tensor.shape)
            if code_pass.axis is not None and code_pass.axis < len(line):
                line[code_pass.axis] = -1
            coded = values.reshape(line).expand(tensor.shape).contiguous()
            yield tensor.name, coded
            coded.data = coded.new_empty(0)  # as in a weight sync: the loader must be done with it

    def _random(self, number: int) -> Tensor:
        """The same values each time, from 1 to 2."""
        tensor, generator = self._tensors[number], torch.Generator(self._device).manual_seed(_SEED + number)
        random = torch.rand(tensor.shape, generator=generator, device=self._device, dtype=self._dtype_of(tensor))
        return random.add_(1)

    def _dtype_of(self, tensor: TensorSpec) -> torch.dtype:
        return torch.float32 if tensor.float32 else self._dtype

    def _decoded(self, values: np.ndarray) -> Read | None:
        try:
            return self._code.read(values)
        except Transformed:
            return None


def viewed(parameter: Tensor, view: View | None) -> Tensor:
    """The parameter with its axes as in the view."""
    if view is None:
        return parameter
    held = parameter.permute([axis for axis in view.axes if axis is not None])
    for place, axis in enumerate(view.axes):
        if axis is None:
            held = held.unsqueeze(place)
    return held


def _take(probes: Sequence[Probe], read: Mapping[str, Read | None], take: Callable[[Probe, Read], None]) -> None:
    for probe in probes:
        found = read[probe.name]
        if found is None:
            raise _transformed(probe.name)
        try:
            take(probe, found)
        except Transformed:
            raise _transformed(probe.name) from None


def _transformed(name: str) -> UserError:
    return UserError(
        f"vLLM's parameter {name!r} is not made up of the model's weights as they are, so that a sync of them cannot be"
        " verified",
        where="rollout",
        remedy="use a model that vLLM serves without computing other weights from its own",
    )


def _blank(parameters: Mapping[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.fill_(SENTINEL)


def _unexplained(parameter: Tensor, probe: Probe) -> Tensor:
    """Elements outside of all shards that the loader has written."""
    written = (parameter != SENTINEL) & (parameter != 0)
    for shard in probe.shards:
        written[probe.local_box(shard)] = False
    return written


def _note(wrong: dict[str, tuple[int, ...]], name: str, where: Tensor) -> None:
    """Notes the first position of a mask."""
    if where.any():
        first = int(where.reshape(-1).to(torch.uint8).argmax())
        wrong[name] = tuple(int(at) for at in np.unravel_index(first, tuple(where.shape)))
