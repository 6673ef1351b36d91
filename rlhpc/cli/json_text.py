"""JSON that commands print: valid for every reader. The fields of each command are in docs/scripting.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def json_text(value: Any, indent: int | None = 2) -> str:
    """The value as JSON; null in place of NaN and infinities, which JSON does not have."""
    return json.dumps(_finite(value), indent=indent, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(one) for one in value]
    return value
