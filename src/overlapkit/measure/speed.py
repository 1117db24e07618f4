"""How much arithmetic a step is, and how much of the device's peak that uses."""

from collections.abc import Mapping

import torch

from overlapkit.measure.closeup import Seen
from overlapkit.measure.device_peaks import DevicePeak, flops_per_s, peak_of


class Speed:
    """FLOPs of a step and model FLOPs utilisation, or the reasons why they are not known.

    MFU is the time that the model's FLOPs take at the peak of the dtypes that they are computed in, as a
    share of the period. FLOPs of recomputation and of the optimizer are not the model's (PaLM, appendix B).

    Args:
        seen: Counted the operators.
        device: Of the training.
        tokens: A step, in the window, or None.
        peak_flops: A second, as the user gave it, or None to look the device up.
        flops_per_token: As the user gave it, or None to count.
    """

    def __init__(
        self,
        seen: Seen,
        device: torch.device,
        tokens: float | None,
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        self._device = device
        self._peak_flops = peak_flops
        self._by_dtype: Mapping[torch.dtype, float] = {}
        self.flops: float | str = self._count(seen, tokens, flops_per_token)

    def mfu(self, period_ms: float | None) -> float | str:
        """As a share of a step of so many milliseconds, or the reason."""
        if isinstance(self.flops, str):
            return self.flops
        if not period_ms:
            return "no step has been measured yet"
        if self._peak_flops is not None:
            return self.flops / self._peak_flops * 1e3 / period_ms
        if self._device.type != "cuda":
            return "the peak of a CPU is not known: give peak_flops="
        name = torch.cuda.get_device_name(self._device)
        peak = peak_of(name)
        if peak is None:
            return f"the peak of {name!r} is not known: give peak_flops="
        if not self._by_dtype:
            return self.flops / (peak.half * 1e12) * 1e3 / period_ms
        seconds = self._seconds(peak)
        return seconds if isinstance(seconds, str) else seconds * 1e3 / period_ms

    def _count(self, seen: Seen, tokens: float | None, per_token: float | None) -> float | str:
        if per_token is not None:
            if tokens is None:
                return "flops_per_token= is given, but step(tokens=) is not"
            return per_token * tokens
        if not seen.counted:
            if seen.compiled:
                return "torch.compile is at work, whose graphs cannot be counted: give flops_per_token="
            return "the operators of no step were counted yet"
        if not seen.flops:
            return "no operator of known arithmetic ran (a CUDA graph?): give flops_per_token="
        scale = tokens / seen.tokens if tokens and seen.tokens else 1.0
        self._by_dtype = {dtype: flops * scale for dtype, flops in seen.flops.items()}
        return sum(self._by_dtype.values())

    def _seconds(self, peak: DevicePeak) -> float | str:
        """At the peak of each dtype."""
        seconds = 0.0
        for dtype, flops in self._by_dtype.items():
            rate = flops_per_s(peak, dtype, tf32=tf32_allowed())
            if rate is None:
                return f"the device's peak for {dtype} is not known: give peak_flops="
            seconds += flops / rate
        return seconds


def tf32_allowed() -> bool:
    """Whether float32 products may use TF32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through torch.backends' newer names, which the older question does not know
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
