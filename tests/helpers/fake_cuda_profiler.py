"""PyTorch's profiler as on a GPU: reports each CPU operator as a kernel named after it.

As on a GPU, kernel time appears three times: on the operators that launch kernels, on the kernels, and on annotated
ranges such as those of torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

RANGE = "Torch-Compiled Region: 0/0"


class Profile:
    """``torch.profiler.profile``."""

    def __init__(self, *, activities: Iterable[ProfilerActivity], **options: Any) -> None:
        self._sees_kernels = ProfilerActivity.CUDA in set(activities)
        self._profile = profile(activities=[ProfilerActivity.CPU], **options)

    def __enter__(self) -> Profile:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def export_chrome_trace(self, path: str) -> None:
        self._profile.export_chrome_trace(path)

    def key_averages(self) -> EventList:
        operators = self._profile.key_averages()
        if not self._sees_kernels:
            return operators
        found = EventList([*operators, *_on_device(operators)])
        for event in found:
            event.use_device = "cuda"
        return found


def _on_device(operators: EventList) -> Iterator[FunctionEventAvg]:
    kernels = [operator for operator in operators if operator.key.startswith("aten::")]
    for operator in kernels:
        operator.self_device_time_total = operator.self_cpu_time_total
        yield _event(f"{operator.key}_kernel", operator.self_cpu_time_total, operator.count, False)
    yield _event(RANGE, sum(operator.self_cpu_time_total for operator in kernels), 1, True)


def _event(name: str, microseconds: float, count: int, is_range: bool) -> FunctionEventAvg:
    event = FunctionEventAvg()
    event.key, event.count, event.device_type, event.is_user_annotation = name, count, DeviceType.CUDA, is_range
    event.device_time_total = event.self_device_time_total = microseconds
    return event
