"""Reads blocks of tensors from a HuggingFace folder, sharded or not, without reading whole files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhpc.checkpoint.formats.model_folder import inside, read_weight_map
from rlhpc.core.errors import UserError, did_you_mean


class SafetensorsFolder:
    """Context manager to read tensors of a folder by name and slice; opens files at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = self._index()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        """One block of tensor ``name``, which must have ``shape`` in the file."""
        if name not in self._file_of:
            raise UserError(
                f"tensor {name!r} is missing",
                where=str(self._folder),
                remedy=did_you_mean(name, self._file_of) + " (config.json and weights must belong together)",
            )
        piece = self._file(self._file_of[name]).get_slice(name)
        found = tuple(piece.get_shape())
        if found != shape:
            raise UserError(
                f"tensor {name!r} has shape {found}, config.json requires {shape}",
                where=str(self._folder / self._file_of[name]),
                remedy="use the config.json that belongs to these weights",
            )
        return piece[slices]

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> None:
        """Copies one block of tensor ``name``, which must have ``shape`` in the file, into ``out``."""
        out.copy_(self.read(name, shape, slices))

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def whole(self, name: str) -> Tensor:
        """A tensor's value."""
        return self._file(self._file_of[name]).get_tensor(name)

    def _index(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            return inside(read_weight_map(index), index)
        file = "model.safetensors"
        if not (self._folder / file).is_file():
            raise UserError(
                "no model.safetensors and no model.safetensors.index.json",
                where=str(self._folder),
                remedy="save the model with save_pretrained (safetensors)",
            )
        return dict.fromkeys(self._file(file).keys(), file)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[name] = safe_open(str(self._folder / name), framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"cannot be read ({error})",
                    where=str(self._folder / name),
                    remedy="the file is damaged or truncated: copy it again",
                ) from None
        return self._open[name]
