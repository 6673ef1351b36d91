"""Uses one of the GPUs that CUDA finds: ``python use_gpu.py INDEX``, a program that a wedged device may keep forever.

Prints a JSON object per line: ``uuids`` of all GPUs, then ``used``; or ``error``, with ``missing`` true if there is no
driver. Imports nothing of rlhpc.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from typing import Any

_BYTES = 1 << 20
_PATTERN = 0xA5


class CudaError(Exception):
    """A call of the driver failed. Its text: the call, CUDA's message and number."""


class NoDriver(CudaError):
    """The driver's library does not load."""


class Driver:
    """CUDA's driver library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoDriver(f"the driver's library does not load ({error})") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode(errors='replace')} ({code})")

    def uuids(self) -> list[str]:
        """UUID of each visible GPU, or of the slice of one (MIG), in CUDA's order."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return [self._uuid(index) for index in range(count.value)]

    def _uuid(self, index: int) -> str:
        content = ctypes.create_string_buffer(16)
        # Version 2 has a slice's own UUID; it came with CUDA 11.4.
        name = "cuDeviceGetUuid_v2" if hasattr(self._library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self.call(name, content, self._device(index))
        return str(uuid.UUID(bytes=content.raw))

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def use(self, index: int) -> None:
        """Writes and reads memory of a GPU in a context of this process."""
        device, context, address = self._device(index), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(_BYTES))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(_PATTERN), ctypes.c_size_t(_BYTES))
        content = ctypes.create_string_buffer(_BYTES)
        self.call("cuMemcpyDtoH_v2", content, address, ctypes.c_size_t(_BYTES))
        if content.raw != bytes([_PATTERN]) * _BYTES:
            raise CudaError("its memory does not hold what was written")
        self.call("cuMemFree_v2", address)
        self.call("cuDevicePrimaryCtxRelease_v2", device)


def main(index: int) -> None:
    try:
        driver = Driver()
        found = driver.uuids()
        _print(uuids=found)
        if index < len(found):
            driver.use(index)
            _print(used=index)
    except CudaError as error:
        _print(error=str(error), missing=isinstance(error, NoDriver))


def _print(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
