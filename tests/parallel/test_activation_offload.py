"""Activations in CPU memory between forward and backward pass: which ones, how many bytes, and when they are back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rlhpc.parallel.activation_offload import ActivationOffload
from tests.helpers.fake_cuda import FakeCuda

pytestmark = pytest.mark.heavy

LAYERS, WIDTH = 5, 8
ROW = 4 * WIDTH  # bytes of a token's activation
DEVICES = ("cpu", "cuda")
Call = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A CPU, and one in place of a GPU."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with FakeCuda():
        yield torch.device("cuda", 0)


class _Watched(ActivationOffload):
    """Notes the storages of what comes back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.inputs: list[StorageWeakRef] = []

    def _bring_back(self, kept: Any) -> None:
        super()._bring_back(kept)
        self.inputs.append(StorageWeakRef(kept.tensor.untyped_storage()))


def recomputed(layer: nn.Module, hidden: Tensor) -> Tensor:
    return checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def stack(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers).to(device)


def forward(model: nn.Sequential, tokens: int, call: Call) -> Tensor:
    """The first layer stands for an embedding: what it returns is the input of the first recomputed one."""
    device = model[0].weight.device
    hidden = model[0](torch.linspace(-1, 1, tokens * WIDTH).view(tokens, WIDTH).to(device))
    for layer in model[1:]:
        hidden = call(layer, hidden)
    return hidden.square().sum()


def gradients(model: nn.Sequential) -> list[list[float]]:
    found = [parameter.grad.flatten().tolist() for parameter in model.parameters()]
    model.zero_grad()
    return found


def saving(offload: ActivationOffload) -> Call:
    def call(layer: nn.Module, hidden: Tensor) -> Tensor:
        with offload.saving():
            return recomputed(layer, hidden)

    return call


@pytest.mark.heavy
def test_gradients_are_bit_equal_and_at_most_two_inputs_are_on_the_device(device: torch.device) -> None:
    model, offload = stack(device), _Watched(device)
    forward(model, 3, recomputed).backward()
    expected, alive = gradients(model), list[int]()

    def look(_: nn.Module, given: Sequence[Tensor]) -> None:
        offload.inputs.append(StorageWeakRef(given[0].untyped_storage()))
        alive.append(len({reference.cdata for reference in offload.inputs if not reference.expired()}))

    for layer in model[1:]:
        layer.register_forward_pre_hook(look)
    loss = forward(model, 3, saving(offload))
    assert (offload.held, offload.most) == (LAYERS * 3 * ROW, LAYERS * 3 * ROW)
    loss.backward()
    assert gradients(model) == expected
    assert len(alive) == 2 * LAYERS, "each layer runs twice"
    assert max(alive) == 2
    assert alive[LAYERS:] == [2] * (LAYERS - 1) + [1], "that of the layer before is on its way"
    assert offload.held == 0


def test_weights_and_what_has_no_gradient_stay(device: torch.device) -> None:
    offload = ActivationOffload(device)
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    given = torch.ones(2, 4, device=device)
    with offload.saving():
        product = given @ weight.view(4, 4)
        assert offload.most == 0
        total = (product * product).sum()
        assert offload.most == 2 * product.nbytes, "both factors"
    total.backward()
    assert weight.grad.tolist() == [[16.0] * 4] * 4


def test_memory_is_used_again_and_grows_to_the_longest_microbatch(device: torch.device) -> None:
    model, offload = stack(device), ActivationOffload(device)
    for tokens in (2, 5, 3, 7):
        forward(model, tokens, saving(offload)).backward()
    sizes, places = [buffer.numel() for buffer in offload._free], {buffer.data_ptr() for buffer in offload._free}
    assert sizes == [7 * ROW] * LAYERS
    assert offload.most == sum(sizes)
    for tokens in (7, 1):
        forward(model, tokens, saving(offload)).backward()
    assert {buffer.data_ptr() for buffer in offload._free} == places


def test_a_graph_that_is_dropped_returns_its_memory(device: torch.device) -> None:
    model, offload = stack(device), ActivationOffload(device)
    loss = forward(model, 3, saving(offload))
    del loss
    assert offload.held == 0
    assert len(offload._free) == LAYERS


def test_passes_in_flight_come_back_in_any_order(device: torch.device) -> None:
    """As in a pipeline: several forward passes, then their backward passes, each of which brings back its own alone."""
    model, offload = stack(device), _Watched(device)
    for tokens in (3, 2, 4):
        forward(model, tokens, recomputed).backward()
    expected, losses = gradients(model), []
    for tokens in (3, 4, 2):
        offload.begin()
        losses.append(forward(model, tokens, recomputed))
        offload.end()
    assert offload.held == (LAYERS + 1) * 9 * ROW, "and what the loss saves"
    for place in (0, 2, 1):
        losses[place].backward()
        assert all(reference.expired() for reference in offload.inputs)
    assert gradients(model) == expected


def test_copies_are_in_pinned_memory_on_a_stream_of_their_own() -> None:
    with FakeCuda() as cuda:
        model, offload = stack(torch.device("cuda", 0)), ActivationOffload(torch.device("cuda", 0))
        loss = forward(model, 3, saving(offload))
        assert cuda.bytes_pinned == LAYERS * 3 * ROW
        loss.backward()
        forward(model, 4, saving(offload)).backward()
        assert cuda.bytes_pinned == LAYERS * 4 * ROW
        assert cuda.count("stream.synchronize") == LAYERS, "before memory is given back to the driver"
        del model, offload, loss


def test_each_stream_waits_for_what_it_reads_and_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers: both inputs leave, the second is still there, the first comes back."""
    events: list[str] = []
    with FakeCuda():
        device = torch.device("cuda", 0)
        model, offload = stack(device)[:3], ActivationOffload(device)
        offload._stream, computing = _Recorded("copies", events), _Recorded("computing", events)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
        forward(model, 3, saving(offload)).backward()
        del model, offload
    assert events == [
        "copies wait for computing",
        "event 1 of copies",
        "computing waits for event 1 of copies",  # before it frees the first input
        "copies wait for computing",
        "event 2 of copies",
        "computing waits for event 2 of copies",
        "copies wait for computing",
        "event 3 of copies",
        "computing waits for event 3 of copies",  # before it reads the first input
    ]


class _Recorded:
    """A stream that notes what it waits for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: _Recorded) -> None:
        self._events.append(f"{self.name} wait for {other.name}")

    def record_event(self) -> str:
        event = f"event {1 + sum(line.startswith('event') for line in self._events)} of {self.name}"
        self._events.append(event)
        return event

    def wait_event(self, event: str) -> None:
        self._events.append(f"{self.name} waits for {event}")
