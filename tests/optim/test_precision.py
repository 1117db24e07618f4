"""Every form of parameters and moments: against fp32, against its own definition, and on both paths."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapkit as ok
from overlapkit.optim import rounding
from overlapkit.optim.optimizer import AdamW
from overlapkit.optim.state import make
from tests.interpreter import interpreter

SHAPES = [(7,), (1300,), (9, 130), (), (0, 4), (3, 256)]
FORMS = [
    ({}, torch.float32),
    ({"moments": "bf16"}, torch.float32),
    ({"moments": "int8"}, torch.float32),
    ({"amsgrad": True, "moments": "bf16"}, torch.float32),
    ({"precision": "bf16_sr"}, torch.bfloat16),
    ({"precision": "bf16_sr", "moments": "int8"}, torch.bfloat16),
    ({"precision": "bf16_kahan", "moments": "bf16"}, torch.bfloat16),
    ({"precision": "bf16_master", "amsgrad": True}, torch.bfloat16),
    ({"moments": "int8"}, torch.bfloat16),
]


def name(value: Any) -> str:
    return ",".join(f"{v}" for v in value.values()) or "fp32" if isinstance(value, dict) else str(value)


def parameters(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(params: list[nn.Parameter], step: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for step in range(2):
        give(params, step, dtype)
        optimizer.step()


@pytest.mark.parametrize(("options", "dtype"), FORMS, ids=name)
def test_kernel_and_plain_torch_agree(options: dict, dtype: torch.dtype) -> None:
    """Both round the same numbers at random in the same way; they may differ by an ulp before that."""
    here, there = parameters(dtype), parameters(dtype)
    a, b = ok.AdamW(here, lr=1e-2, **options), ok.AdamW(there, lr=1e-2, **options)
    with interpreter():
        train(here, a, dtype)
    train(there, b, dtype)
    for p, q in zip(here, there, strict=True):
        wide = torch.finfo(dtype).eps * q.abs()
        differ = (p.float() - q.float()).abs() > 4e-7 + 1e-6 * q.abs().float()
        assert differ.float().mean().nan_to_num() <= 0.01
        assert ((p - q).abs() <= 2 * wide + 1e-4).all()
        assert a.state[p]["step"] == b.state[q]["step"] == 2


@pytest.mark.parametrize(("options", "dtype"), [FORMS[0], *FORMS[2:6], FORMS[6]], ids=name)
def test_near_torch_in_fp32_after_twenty_steps(options: dict, dtype: torch.dtype, path: str) -> None:
    params = parameters(dtype, [(5, 140)])
    truth = [nn.Parameter(p.detach().float()) for p in params]
    amsgrad = options.get("amsgrad", False)
    a = ok.AdamW(params, lr=1e-2, **options)
    b = torch.optim.AdamW(truth, lr=1e-2, amsgrad=amsgrad, foreach=False)
    start = truth[0].detach().clone()
    for step in range(20):
        give(params, step, dtype)
        truth[0].grad = params[0].grad.float()
        a.step()
        b.step()
    moved = (truth[0] - start).norm()
    off = (params[0].float() - truth[0]).norm()
    limit = moved * (1e-6 if not options else 0.03 if dtype == torch.float32 else 0.12)
    if options.get("precision") == "bf16_sr":  # each step is off by at most one ulp, in either direction
        limit = 20**0.5 * 2**-8 * start.norm()
    assert off <= limit, off / limit


def master_steps(dtype: torch.dtype, params: list[nn.Parameter], steps: int) -> list[Tensor]:
    """A bf16 model with a separate fp32 master, which the fp32 optimizer steps."""
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = ok.AdamW(masters, lr=1e-2, max_norm=1.0)
    for step in range(steps):
        give(params, step, dtype)
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        for master, param in zip(masters, params, strict=True):
            param.data.copy_(rounding.split(master.detach())[0])
    return masters


def test_master_is_bitwise_a_bf16_model_with_an_fp32_master(interpreted: None) -> None:
    params, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    masters = master_steps(torch.bfloat16, other, 20)
    optimizer = ok.AdamW(params, lr=1e-2, max_norm=1.0)
    for step in range(20):
        give(params, step, torch.bfloat16)
        optimizer.step()
    for p, q, master in zip(params, other, masters, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(rounding.join(p.detach(), optimizer.state[p]["remainder"]), master)


def test_split_inverts_for_every_kind_of_number() -> None:
    bits = torch.cat(
        [
            torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64),
            torch.tensor(
                [0x3F7F8000, 0x3F808000, 0x7F800000, -0x800000, 0, -(2**31), 1, 0x7F7FFFFF, 0x7FFFFFFF]
            ),
        ]
    ).to(torch.int32)
    x = bits.view(torch.float32)
    high, low = rounding.split(x)
    back = rounding.join(high, low)
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back[~x.isnan()].view(torch.int32), bits[~x.isnan()])
    assert torch.equal(high.isnan(), x.isnan())
    assert low.dtype == torch.float16
    near = x[x.abs() < 1e38]
    assert torch.allclose(rounding.split(near)[0].float(), near, rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_rounding_is_without_bias(moments: str) -> None:
    x = torch.linspace(-1, 1, 128).abs().clamp(min=1e-3) * torch.tensor([1.0, -1.0]).repeat(64)
    total = torch.zeros(128)
    rounds = 2000
    scale = x.abs().max().expand(1)
    for step in range(rounds):
        random = rounding.high_half(rounding.random_bits(rounding.step_key(7, step), torch.arange(128)))
        if moments == "bf16":
            total += rounding.stochastic(x, random).float()
        else:
            total += rounding.signed_value(rounding.signed_code(x, scale, random), scale)
    spacing = x.abs() * 2**-7 if moments == "bf16" else (2 * (x.abs() * 16129).sqrt() + 1) / 16129
    # the mean of n draws between two neighbours is off by at most 5 standard deviations of 0.5 / sqrt(n)
    assert ((total / rounds - x).abs() <= spacing * 5 * 0.5 / rounds**0.5 + 1e-6).all()


def test_the_second_moment_is_never_zero_where_it_is_none() -> None:
    v = torch.tensor([[1.0, 1e-12, 1e-30, 0.0]])
    code = rounding.unsigned_code(v, torch.ones(1, 1), torch.full((1, 4), 65_535, dtype=torch.int32))
    assert code.tolist() == [[255, 1, 1, 0]]


def test_int8_codes_survive_the_way_through_fp32() -> None:
    scale = torch.tensor([[3.7e-5]])
    for value, code, codes in (
        (rounding.signed_value, rounding.signed_code, torch.arange(-127, 128)),
        (rounding.unsigned_value, rounding.unsigned_code, torch.arange(0, 256)),
    ):
        numbers = value(codes[None], scale)
        assert torch.equal(code(numbers, rounding.scale_of(numbers), None).long(), codes[None])


def test_what_is_no_number_is_not_lost_in_int8(path: str) -> None:
    params = parameters(torch.float32, [(2, 256)])
    optimizer = ok.AdamW(params, moments="int8")
    give(params, 0, torch.float32)
    params[0].grad[0, 3] = float("nan")
    optimizer.step()
    scale = optimizer.state[params[0]]["exp_avg_scale"]
    assert scale.isnan().tolist() == [[True, False], [False, False]]
    assert params[0].isnan().sum() == 1


def test_the_random_bits_belong_to_step_parameter_and_element(path: str) -> None:
    twins = parameters(torch.bfloat16, [(40, 64)]), parameters(torch.bfloat16, [(40, 64)])
    both = [ok.AdamW(p, lr=1e-3, precision="bf16_sr") for p in twins]
    pair = parameters(torch.bfloat16, [(40, 64), (40, 64)])
    pair[1].data.copy_(pair[0].data)
    two = ok.AdamW(pair, lr=1e-3, precision="bf16_sr")
    for params, optimizer in [*zip(twins, both, strict=True), (pair, two)]:
        for step in range(2):
            for param in params:
                param.grad = torch.full_like(param, 0.3 + step)
            optimizer.step()
    assert torch.equal(*(params[0] for params in twins))
    assert torch.equal(pair[0], twins[0][0])
    assert not torch.equal(pair[0], pair[1])


@pytest.mark.parametrize(("options", "dtype"), FORMS, ids=name)
def test_state_is_one_allocation_a_dtype_of_the_announced_size(options: dict, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = ok.AdamW(params, **options)
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for x in state.values()
        if x.numel()
    }
    assert sum(storages.values()) == AdamW.memory(params, **options)
    assert len(storages) == len({x.dtype for state in optimizer.state.values() for x in state.values()})
    before = {x.data_ptr() for state in optimizer.state.values() for x in state.values()}
    give(params, 0, dtype)
    optimizer.step()
    assert before == {x.data_ptr() for state in optimizer.state.values() for x in state.values()}


def test_memory_of_meta_parameters_and_of_groups() -> None:
    meta = [nn.Parameter(torch.empty(100, 128, device="meta", dtype=torch.bfloat16))]
    assert AdamW.memory(meta) == 64 + 12_800 * (4 + 4 + 2)
    assert AdamW.memory(meta, precision="bf16_sr", moments="int8") == 64 + 2 * (12_800 + 448)
    groups = [{"params": meta, "amsgrad": True}, {"params": [("name", meta[0])]}]
    assert AdamW.memory(groups) == 2 * 64 + 12_800 * (14 + 10)
    with pytest.raises(ValueError, match="precision='fp8'"):
        AdamW.memory(meta, precision="fp8")
    assert len(make(meta, [ok.AdamW(meta)._form(meta[0], {"amsgrad": False})], None)) == 1


def test_small_and_narrow_parameters_keep_fp32_moments() -> None:
    params = parameters(torch.float32, [(4096,), (64, 63), (3, 64), (2, 4, 16)])
    optimizer = ok.AdamW(params, moments="int8")
    assert [optimizer.state[p]["exp_avg"].dtype for p in params] == [torch.float32] * 2 + [torch.int8] * 2


def test_a_bf16_model_gets_moments_in_fp32_and_does_not_stall() -> None:
    """Updates far below a bf16 ulp of the weight add up, as they do in fp32 (AReaL#1292)."""
    for options in ({}, {"precision": "bf16_kahan"}, {"precision": "bf16_sr"}):
        param = nn.Parameter(torch.full((8, 512), 1.0, dtype=torch.bfloat16))
        optimizer = ok.AdamW([param], lr=1e-4, weight_decay=0.0, **options)
        assert optimizer.state[param]["exp_avg"].dtype == torch.float32
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        assert abs(param.float().mean().item() - 0.99) <= 2**-9 + 1e-4  # half an ulp; torch's own stays at 1


def test_deepcopy_goes_on_bitwise_with_int8(path: str) -> None:
    params = parameters(torch.bfloat16, [(3, 130)])
    optimizer = ok.AdamW(params, moments="int8")
    give(params, 0, torch.bfloat16)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    twins = other.param_groups[0]["params"]
    give(params, 1, torch.bfloat16)
    give(twins, 1, torch.bfloat16)
    optimizer.step()
    other.step()
    assert torch.equal(params[0], twins[0])
    assert other.state_dict()["state"][0]["exp_avg"].dtype == torch.float32
