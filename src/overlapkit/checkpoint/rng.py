"""The states of the random generators that a training script draws from without owning them."""

import base64
import random
from typing import Any

import numpy as np
import torch

from overlapkit.checkpoint.codec import decode, encode


def capture() -> dict[str, Any]:
    """The states of torch's generators (CPU, current CUDA device), numpy's and random's, in copies."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


def typed(captured: dict[str, Any]) -> Any:
    """What `capture` gave, as typed JSON."""
    texts = {key: None if captured[key] is None else _text(captured[key]) for key in ("torch", "cuda")}
    return encode({**captured, **texts}, "rng", _no_tensor)


def check(captured: Any) -> None:
    """Raise where it is not what `typed` gave: none of the generators would be set then."""
    states = decode(captured, _no_tensor)
    torch.Generator().set_state(_tensor(states["torch"]))
    if states["cuda"] is not None:
        _tensor(states["cuda"])
    np.random.RandomState(0).set_state(states["numpy"])
    random.Random(0).setstate(states["random"])


def put_back(captured: Any) -> None:
    """Set the generators to what `typed` gave. The CUDA one only where there is a device."""
    states = decode(captured, _no_tensor)
    torch.set_rng_state(_tensor(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _no_tensor(*found: object) -> Any:
    raise ValueError("the states of random generators hold no tensors")
