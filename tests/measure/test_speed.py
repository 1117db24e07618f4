import pytest
import torch

from overlapkit.measure import StepMeter
from overlapkit.measure.closeup import Seen
from overlapkit.measure.speed import Speed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def seen(**flops):
    by_dtype = {getattr(torch, name): value for name, value in flops.items()}
    return Seen(counted=1, tokens=100, flops=by_dtype)


def test_utilisation_is_the_time_at_the_peak_over_the_time_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    speed = Speed(seen(bfloat16=312e9, float32=19.5e9), CUDA, None)
    assert speed.flops == 331.5e9
    assert speed.mfu(4.0) == pytest.approx(0.5)  # 1 ms at each peak


def test_flops_grow_with_the_tokens():
    assert Speed(seen(float32=1e9), CPU, 300.0, 1e12).flops == 3e9
    assert Speed(seen(float32=1e9), CPU, None, 1e12).flops == 1e9
    assert Speed(seen(float32=1e9), CPU, 100.0, 1e12).mfu(2.0) == pytest.approx(0.5)
    given = Speed(Seen(), CPU, 300.0, 1e12, flops_per_token=1e6)
    assert (given.flops, given.mfu(1.0)) == (3e8, pytest.approx(0.3))


@pytest.mark.parametrize(
    ("speed", "reason"),
    [
        (lambda: Speed(seen(float32=1e9), CPU, None), "the peak of a CPU is not known: give peak_flops="),
        (lambda: Speed(seen(float32=1e9), CUDA, None), "the peak of 'Voodoo 2' is not known"),
        (lambda: Speed(Seen(), CPU, None), "no step were counted yet"),
        (lambda: Speed(Seen(compiled=True), CPU, None), "flops_per_token="),
        (lambda: Speed(Seen(counted=1), CPU, None), "CUDA graph"),
        (lambda: Speed(Seen(), CPU, None, flops_per_token=1.0), r"step\(tokens=\)"),
    ],
)
def test_what_is_not_known_says_why(monkeypatch, speed, reason):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Voodoo 2")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(speed().mfu(1.0))


def test_a_dtype_without_a_peak_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert "torch.float64" in Speed(seen(float64=1e9), CUDA, None).mfu(1.0)


@pytest.mark.parametrize("name", ["peak_flops", "flops_per_token"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("x", TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1.0, ValueError),
        (float("inf"), ValueError),
        (float("nan"), ValueError),
    ],
)
def test_they_are_numbers_above_zero(name, value, error):
    with pytest.raises(error, match=f"{name}="):
        StepMeter(**{name: value})
