import pytest
import torch

from overlapkit.measure import wasted
from overlapkit.measure.device_peaks import flops_per_s, peak_of
from overlapkit.measure.operators import Product
from overlapkit.measure.wasted import find_waste, odd_sizes

A100 = "NVIDIA A100-SXM4-80GB"


def product(m=64, k=64, n=64, dtype=torch.bfloat16, device="cuda"):
    return Product("aten.mm", 1, m, k, n, dtype, device)


@pytest.fixture
def tf32(monkeypatch):
    """Whether TF32 is allowed; the machine's own setting stays."""
    allowed = [False]
    monkeypatch.setattr(wasted, "tf32_allowed", lambda: allowed[0])
    return allowed


@pytest.mark.parametrize(
    ("dtype", "allowed", "sizes", "odd"),
    [
        (torch.bfloat16, False, (64, 768, 50257), ["n=50257"]),
        (torch.float16, False, (63, 764, 8), ["m=63", "k=764"]),
        (torch.bfloat16, False, (64, 768, 50304), []),
        (torch.bfloat16, False, (3, 768, 4), []),  # smaller than a tile: padding would not help
        (torch.float32, False, (63, 767, 50257), []),  # no tensor cores at all
        (torch.float32, True, (64, 766, 50260), ["k=766"]),
        (torch.float8_e4m3fn, False, (64, 72, 48), ["k=72"]),
        (torch.float64, False, (63, 3, 5), []),
    ],
)
def test_sizes_that_miss_tiles(dtype, allowed, sizes, odd):
    assert odd_sizes(product(*sizes, dtype=dtype), tf32=allowed) == odd


def test_healthy_products_waste_nothing(tf32):
    products = {product(): 10**9, product(n=128, dtype=torch.float16): 10**9}
    assert list(find_waste(products, A100, (8, 0))) == []


def test_full_float32_is_named_with_what_tf32_would_leave(tf32):
    products = {product(dtype=torch.float32): 3 * 10**9, product(): 10**9}
    (waste,) = find_waste(products, A100, (8, 0))
    assert waste.share == 0.75
    assert waste.saved == pytest.approx(1 - 19.5 / 156)
    assert "set_float32_matmul_precision" in waste.component
    tf32[0] = True
    assert list(find_waste(products, A100, (8, 0))) == []


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("a device that nobody knows", (7, 5)),
        ("AMD Instinct MI250X", (9, 0)),
        ("AMD Instinct MI355X", (9, 5)),
    ],
)
def test_where_there_is_no_tf32_none_is_missed(tf32, device, capability):
    assert list(find_waste({product(dtype=torch.float32): 10**9}, device, capability)) == []


def test_a_vocabulary_that_misses_is_named_with_the_size_to_take(tf32):
    products = {product(n=50257): 10**9, product(k=50257): 2 * 10**9, product(): 10**9}
    (waste,) = find_waste(products, A100, (8, 0))
    assert waste.share == 0.75
    assert "(64, 50257) x (50257, 64) in bfloat16" in waste.setting
    assert "raise k=50257 to k=50304" in waste.setting


def test_products_of_the_host_are_no_concern(tf32):
    assert list(find_waste({product(n=7, device="cpu", dtype=torch.float32): 10}, A100, (8, 0))) == []


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989.4),
        (A100, 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("Tesla V100-SXM2-16GB", 125),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name, half):
    assert peak_of(name).half == half


def test_unknown_devices_and_dtypes_have_no_peak():
    assert peak_of("NVIDIA GeForce GTX 1080") is None
    a100 = peak_of(A100)
    assert flops_per_s(a100, torch.bfloat16, tf32=False) == 312e12
    assert flops_per_s(a100, torch.float32, tf32=False) == 19.5e12
    assert flops_per_s(a100, torch.float32, tf32=True) == 156e12
    assert flops_per_s(a100, torch.float8_e4m3fn, tf32=True) is None
    assert flops_per_s(a100, torch.float64, tf32=True) is None
