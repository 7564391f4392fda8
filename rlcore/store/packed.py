"""Bytes, arrays and tensors inside JSON: what a processor makes of an image, for one.

Each becomes an object with the key `__sluice__`, which says what it was, and its bytes in base64.

Invariant: `unpack` gives back what `pack` was given: type, dtype, shape and every bit.
"""

import base64
import json
import sys
from typing import Any

MARK = '"__sluice__"'
_KIND = json.loads(MARK)


def pack(value: Any) -> dict[str, Any]:
    """What JSON has no form for, as an object that it has.

    Raises:
        TypeError: the value is of no known kind.
    """
    import numpy as np

    if isinstance(value, np.generic):
        return pack(np.asarray(value)) | {_KIND: "scalar"}
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "data": _text(bytes(value))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {
            _KIND: "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "data": _text(np.ascontiguousarray(value).tobytes()),
        }
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return {
            _KIND: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": _text(flat.view(torch.uint8).numpy().tobytes()),
        }
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def unpack(tree: dict[str, Any]) -> Any:
    """The inverse of `pack`, as an object hook of a JSON reader. Other objects stay as they are."""
    kind = tree.get(_KIND)
    if kind not in ("bytes", "array", "scalar", "tensor"):
        return tree
    data = base64.b64decode(tree["data"])
    if kind == "bytes":
        return data
    if kind in ("array", "scalar"):
        import numpy as np

        array = np.frombuffer(data, tree["dtype"]).reshape(tree["shape"]).copy()
        return array if kind == "array" else array[()]
    import torch

    # An empty buffer has no tensor.
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    dtype = getattr(torch, tree["dtype"])
    return (flat.view(dtype) if data else flat.to(dtype)).reshape(tree["shape"])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
