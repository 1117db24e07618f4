"""Typed JSON: plain Python values to JSON and back, exactly, with nothing pickled.

JSON alone turns int keys into strings and tuples into lists, which is how MultiStepLR forgets its
milestones. What JSON cannot say is written as {"$": type, "v": value}; tensors are handed to the
caller, and only a reference to them is kept.
"""

import argparse
import base64
import json
import math
import os
import re
import types
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch

KeepTensor = Callable[[str, torch.Tensor], str]
"""Takes the path and the tensor found there; returns the name under which it is kept."""

_PAIRS: dict[type, str] = {dict: "dict", Counter: "Counter", OrderedDict: "OrderedDict"}
_LISTS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "Size"}
_NUMPY_KINDS = "biufcSUmM"  # bool, integers, floats, complex, bytes, text, times: all but objects and records

_MARK = uuid.uuid4().hex  # stands for a Constant's text, until that is put in


class Constant:
    """Typed JSON that many saves have in common: encoded once, and its text is made once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @cached_property
    def text(self) -> str:
        """Its JSON."""
        text, self._value = dump(self._value), None
        return text


def dump(value: Any) -> str:
    """Typed JSON, which may hold Constants, as text."""
    found: list[Constant] = []

    def mark(constant: Constant) -> str:
        found.append(constant)
        return f"{_MARK}{len(found) - 1}"

    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=mark)
    return re.sub(f'"{_MARK}(\\d+)"', lambda match: found[int(match[1])].text, text) if found else text


def root(key: object) -> str:
    """The path of a top-level key. Slashes are escaped, so that two paths never read the same."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def join(path: str, key: object) -> str:
    """The path of a member."""
    return f"{path}/{root(key)}"


def encode(value: Any, path: str, keep: KeepTensor) -> Any:
    """Turn a value into typed JSON.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict (any encodable keys), set,
            Counter, OrderedDict, deque, numpy scalar or array, torch dtype, device, Size or Tensor.
        path: Where the value stands, for errors and for naming tensors.
        keep: Called for every tensor.

    Raises:
        TypeError: Something in it cannot be kept; the message names its path and type.
        ValueError: It refers to itself.
    """
    try:
        return _encode(value, path, keep)
    except RecursionError:
        raise ValueError(
            f"state {path!r} is nested too deeply, or refers to itself: it cannot be kept"
        ) from None


def _encode(value: Any, path: str, keep: KeepTensor) -> Any:
    kind = type(value)
    if value is None or kind is int or kind is str or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: _encode(item, join(path, key), keep) for key, item in value.items()}
    if kind is list:
        return [_encode(item, f"{path}/{i}", keep) for i, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return _tagged("tensor", keep(path, value))
    if kind in _PAIRS:
        pairs = [[_encode(k, path, _no_key), _encode(v, join(path, k), keep)] for k, v in value.items()]
        return _tagged(_PAIRS[kind], pairs)
    if kind in _LISTS:
        return _tagged(_LISTS[kind], [_encode(item, f"{path}/{i}", keep) for i, item in enumerate(value)])
    if kind is Constant:
        return value
    if kind is deque:
        return {"$": "deque", "maxlen": value.maxlen, "v": _encode(list(value), path, keep)}
    return _encode_leaf(value, kind, path)


def _encode_leaf(value: Any, kind: type, path: str) -> Any:
    if kind is bytes or kind is bytearray:
        return _tagged(kind.__name__, base64.b64encode(value).decode())
    if kind is complex:
        return _tagged("complex", [repr(value.real), repr(value.imag)])
    if (isinstance(value, np.generic) or kind is np.ndarray) and value.dtype.kind in _NUMPY_KINDS:
        data = base64.b64encode(value.tobytes()).decode()
        tag = "ndarray" if kind is np.ndarray else "numpy"
        return {"$": tag, "dtype": value.dtype.str, "shape": list(value.shape), "v": data}
    if kind is torch.dtype:
        return _tagged("dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return _tagged("device", str(value))
    raise TypeError(
        f"state {path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept without pickling: "
        f"give plain values{_instead(value)}, tensors, or (at the top level of state) a module, an optimizer "
        "or an object with state_dict() and load_state_dict()"
    )


def _instead(value: Any) -> str:
    """What makes a plain value of one that people put into a state."""
    if isinstance(value, os.PathLike):
        return " (here str(...))"
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return " (here vars(...))"
    if is_dataclass(value) and not isinstance(value, type):
        return " (here dataclasses.asdict(...))"
    if isinstance(value, Enum):
        return " (here its .value)"
    return ""


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {"$": tag, "v": value}


def _no_key(path: str, tensor: torch.Tensor) -> str:
    raise TypeError(f"state {path!r} has a tensor as a key: it cannot be kept")


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Turn typed JSON back into the value.

    Args:
        value: What `encode` returned, also after a trip through `json`.
        tensor: Gives the tensor of a name.

    Raises:
        ValueError: It is not typed JSON of this format.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    tag, inner = value["$"], value["v"]
    if tag == "tensor":
        return tensor(inner)
    if tag == "deque":
        return deque(decode(inner, tensor), value["maxlen"])
    if tag in _PAIRS.values():
        pairs = [(decode(k, tensor), decode(v, tensor)) for k, v in inner]
        made: Any = next(kind for kind, name in _PAIRS.items() if name == tag)()
        made.update(pairs if tag != "Counter" else dict(pairs))
        return made
    if tag in _LISTS.values():
        return next(kind for kind, name in _LISTS.items() if name == tag)(decode(inner, tensor))
    if tag in ("numpy", "ndarray"):
        return _decode_numpy(tag, value)
    return _decode_leaf(tag, inner)


def _decode_numpy(tag: str, value: dict[str, Any]) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {value['dtype']!r} is not one that is kept")
    array = np.frombuffer(base64.b64decode(value["v"]), dtype=dtype).reshape(value["shape"]).copy()
    return array if tag == "ndarray" else array[()]


def _decode_leaf(tag: Any, inner: Any) -> Any:
    if tag == "float":
        return float(inner)
    if tag == "bytes":
        return base64.b64decode(inner)
    if tag == "bytearray":
        return bytearray(base64.b64decode(inner))
    if tag == "complex":
        return complex(float(inner[0]), float(inner[1]))
    if tag == "dtype":
        dtype = getattr(torch, inner, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    if tag == "device":
        return torch.device(inner)
    raise ValueError(f"{tag!r} ({inner!r}) is no type that this version of overlapkit can read")


def tensor_names(value: Any) -> Iterator[str]:
    """The names of all tensors that a typed JSON value refers to."""
    if isinstance(value, list):
        for item in value:
            yield from tensor_names(item)
    elif isinstance(value, dict):
        if value.get("$") == "tensor":
            yield value["v"]
        else:
            yield from tensor_names(list(value.values()))
