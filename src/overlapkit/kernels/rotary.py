"""RotaryEmbedding: the tables of angles that `rope` reads, in float32 whatever the model's dtype."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_number
from overlapkit.kernels.rope import rope

_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class RotaryEmbedding(nn.Module):
    """`rope` with its tables: one for all layers of a model, 4 * dim * max_positions bytes.

    The tables are buffers that no state_dict holds. They are computed in float64 from the usual float32
    frequencies, and anew whenever the module is moved or converted, so model.bfloat16(), to_empty() and
    the meta device leave them exact. DDP sends all buffers at each forward unless broadcast_buffers=False.

    Args:
        dim: Columns of a head that turn, even: the head's width, or less for a partial rotation.
        max_positions: Rows of the tables.
        base: Pair i turns by base ** (-2i / dim) radians a position (rope_theta).
        interleaved: As in `rope`.
        scaling: How frequencies change for longer contexts, in the words of a transformers config's
            rope_parameters or rope_scaling: rope_type "default", "linear" (factor) or "llama3" (factor,
            low_freq_factor, high_freq_factor, original_max_position_embeddings). A rope_theta in it must
            be base. For other kinds call `rope` with tables of your own.
        device: Where the tables are made.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is out of range, or scaling lacks a key or has one too many.
        NotImplementedError: scaling is of another kind.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int,
        base: float = 10_000.0,
        *,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("max_positions", max_positions)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass an int")
        if dim < 2 or dim % 2:
            raise ValueError(f"dim={dim}: allowed are even numbers from 2 up")
        if max_positions < 1:
            raise ValueError(f"max_positions={max_positions}: allowed are numbers from 1 up")
        check_number("base", base)
        if not 0.0 < base < math.inf:
            raise ValueError(f"base={base}: allowed are finite numbers above 0")
        self.dim, self.max_positions, self.base, self.interleaved = dim, max_positions, base, interleaved
        self.scaling = _check_scaling(scaling, base)
        place = torch.empty(0, device=device).device
        self.register_buffer("cos", torch.empty(0, device=place), persistent=False)
        self.register_buffer("sin", torch.empty(0, device=place), persistent=False)
        self._fill(place)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what `rope` returns for q (B, T, H, D), k (B, T, K, D) and positions (T,) or (B, T)."""
        if self.cos.is_meta and not q.is_meta:  # load_state_dict(assign=True) gives a meta model no buffers
            self._fill(q.device)
        options = {"interleaved": self.interleaved, "rotary_dim": self.dim}
        return rope(q, k, self.cos, self.sin, positions, **options)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Every move and conversion of a module comes through here."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill(self.cos.device)
        return self

    @torch.inference_mode(False)  # backward could not save tables that were made in inference mode
    def _fill(self, device: torch.device) -> None:
        """Compute both tables."""
        if device.type == "meta":
            shape = (self.max_positions, self.dim // 2)
            self.cos, self.sin = (torch.empty(shape, dtype=torch.float32, device=device) for _ in "cs")
            return
        place = device if device.type == "cuda" else torch.device("cpu")  # others may have no float64
        frequency = _frequencies(self.dim, self.base, self.scaling).to(place).double()
        position = torch.arange(self.max_positions, dtype=torch.float64, device=place)
        angle = torch.outer(position, frequency)
        self.cos, self.sin = angle.cos().float().to(device), angle.sin().float().to(device)

    def extra_repr(self) -> str:
        """What it was made with."""
        text = f"{self.dim}, max_positions={self.max_positions}, base={self.base}"
        text += ", interleaved=True" if self.interleaved else ""
        return text + (f", scaling={self.scaling}" if self.scaling["rope_type"] != "default" else "")


def _check_scaling(scaling: Mapping[str, Any] | None, base: float) -> dict[str, Any]:
    """The scaling as {rope_type, and its numbers}."""
    given = dict(scaling or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    if kind not in _SCALINGS:
        raise NotImplementedError(
            f"scaling has rope_type={kind!r}: there are {', '.join(map(repr, _SCALINGS))}; for another one "
            "compute cos and sin, and call kernels.rope"
        )
    if given.pop("rope_theta", base) != base:
        raise ValueError(f"scaling has a rope_theta that is not base={base}: pass it as base")
    wanted = _SCALINGS[kind]
    if set(given) != set(wanted):
        raise ValueError(
            f"scaling of rope_type={kind!r} has {sorted(given)}: needed are {sorted(wanted)}, and no others"
        )
    for name, value in given.items():
        check_number(f"scaling[{name!r}]", value)
        if not value > 0:
            raise ValueError(f"scaling[{name!r}]={value}: allowed are numbers above 0")
    return {"rope_type": kind, **given}


def _frequencies(dim: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Radians a position turns each pair, (dim / 2,) float32: from the CPU, as checkpoints have them."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequency = 1.0 / torch.pow(base, exponent)
    if scaling["rope_type"] == "linear":
        return frequency / float(scaling["factor"])
    if scaling["rope_type"] == "llama3":
        return _llama3(frequency, **{name: scaling[name] for name in _SCALINGS["llama3"]})
    return frequency


def _llama3(
    frequency: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1's: what turns often enough in the old context stays, what does not slows down by factor."""
    turns = original_max_position_embeddings * frequency / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequency / factor + kept * frequency
