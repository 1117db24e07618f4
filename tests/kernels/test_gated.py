from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from tests.kernels.judge import compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 37), (1, 1), (7,), (2, 3, 255), (0, 16), (4, 0), (300, 8), (3, 4097)]


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return kernels.geglu(gate, up, approximate="tanh")


def torchs(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


FAMILY: dict[str, tuple[Any, Any]] = {
    "swiglu": (kernels.swiglu, torchs),
    "geglu": (kernels.geglu, lambda gate, up: F.gelu(gate) * up),
    "geglu tanh": (geglu_tanh, lambda gate, up: F.gelu(gate, approximate="tanh") * up),
}
PACKED: dict[str, Any] = {
    "swiglu": kernels.swiglu_packed,
    "geglu": kernels.geglu_packed,
    "geglu tanh": lambda x, order: kernels.geglu_packed(x, order, approximate="tanh"),
}


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(shape)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = (make(*shape, dtype=dtype), make(*shape, dtype=dtype))
    compare(kernels.swiglu, torchs, inputs, (torch.randn(shape).to(dtype),))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 37), (3, 4097)], ids=str)
@pytest.mark.parametrize("name", ["geglu", "geglu tanh"])
def test_geglu_is_as_good_as_torchs(path: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = (make(*shape, dtype=dtype), make(*shape, dtype=dtype))
    compare(*FAMILY[name], inputs, (torch.randn(shape).to(dtype),))


@pytest.mark.parametrize("name", FAMILY)
def test_extreme_gates_stay_finite(path: str, name: str) -> None:
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], requires_grad=True)
    ours, torchs = FAMILY[name]
    y, dgate, dup = run(ours, (gate, torch.ones(5, requires_grad=True)), (torch.ones(5),))
    activated = torchs(gate.detach(), 1.0)
    torch.testing.assert_close(y, activated)
    torch.testing.assert_close(dgate, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    torch.testing.assert_close(dup, activated)


def test_tanh_keeps_the_digits_of_a_closing_gate(interpreted: None) -> None:
    """Down there 1 + tanh(u) has none left: torch gives 0."""
    gate = torch.linspace(-6.0, -3.0, 50)
    truth = F.gelu(gate.double(), approximate="tanh")
    error = (geglu_tanh(gate, torch.ones(50)).double() - truth).abs() / truth.abs()
    assert error.max() < 1e-5


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("name", FAMILY)
def test_halves_of_one_projection(path: str, name: str, order: str) -> None:
    ours, torchs = FAMILY[name]

    def halves(h: Tensor) -> list[Tensor]:
        return list(h.chunk(2, dim=-1))[:: 1 if order == "gate_up" else -1]

    def packed(h: Tensor) -> Tensor:
        y = PACKED[name](h, order)
        assert isinstance(y, Tensor)
        return y

    inputs, grads = (make(2, 5, 74, dtype=torch.bfloat16),), (torch.randn(2, 5, 37),)
    compare(packed, lambda h: torchs(*halves(h)), inputs, grads)
    two = run(lambda h: ours(*halves(h)), inputs, grads)
    for a, b in zip(run(packed, inputs, grads), two, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(1, 2), (8,), (0, 16), (4, 0), (3, 4098)], ids=str)
def test_packed_shapes(path: str, shape: tuple[int, ...]) -> None:
    half = (*shape[:-1], shape[-1] // 2)
    compare(
        lambda h: kernels.swiglu_packed(h, "gate_up"),
        lambda h: torchs(*h.tensor_split(2, dim=-1)),
        (make(*shape),),
        (torch.randn(half),),
    )


@pytest.mark.parametrize(
    "h", [torch.randn(8, 6).t(), torch.randn(6, 20)[:, 3:11], torch.randn(1, 8).expand(6, 8)]
)
def test_packed_strides(path: str, h: Tensor) -> None:
    compare(
        lambda h: kernels.swiglu_packed(h, "up_gate"),
        lambda h: torchs(h[..., 4:], h[..., :4]),
        (h.detach().requires_grad_(),),
        (torch.randn(()).expand(6, 4),),
    )


@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_what_is_frozen_costs_nothing(path: str, frozen: str) -> None:
    gate, up = make(5, 37).requires_grad_(frozen != "gate"), make(5, 37).requires_grad_(frozen != "up")
    compare(kernels.geglu, FAMILY["geglu"][1], (gate, up), (torch.randn(5, 37),))


@pytest.mark.parametrize("packed", [False, True])
def test_halves_of_one_projection_are_not_copied(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    h = torch.randn(5, 74)
    seen: list[Tensor] = []
    from overlapkit.kernels.raw import gated as raw

    launch = raw._forward.launch
    monkeypatch.setattr(
        raw._forward, "launch", lambda grid, *args, **kw: (seen.extend(args[:2]), launch(grid, *args, **kw))
    )
    if packed:
        kernels.swiglu_packed(h, "gate_up")
    else:
        kernels.swiglu(*h.chunk(2, dim=-1))
    gate, up = seen
    assert (gate.data_ptr(), up.data_ptr()) == (h.data_ptr(), h.data_ptr() + 37 * 4)


@pytest.mark.parametrize(
    "grad", [torch.randn(()).expand(6, 9), torch.randn(9, 6).t(), torch.randn(12, 9)[::2]]
)
def test_any_strides(path: str, grad: Tensor) -> None:
    gate, up = torch.randn(9, 6).t().requires_grad_(), torch.randn(6, 20)[:, 3:12].requires_grad_()
    compare(kernels.swiglu, torchs, (gate, up), (grad,))
    compare(kernels.swiglu, torchs, (grad.requires_grad_(), up), (torch.randn(6, 9),))


def test_gradcheck_of_the_plain_form() -> None:
    for ours, _ in FAMILY.values():
        assert torch.autograd.gradcheck(ours, [torch.randn(3, 5).double().requires_grad_() for _ in "gu"])


@pytest.mark.parametrize("fn", [lambda x: kernels.geglu(x, x), lambda x: kernels.swiglu_packed(x, "gate_up")])
def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None, fn: Any) -> None:
    x = make(3, 6)
    (first,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu or geglu cannot be differentiated twice"):
        first.sum().backward()


def test_inputs_are_left_alone_and_a_retained_graph_gives_the_same_again(interpreted: None) -> None:
    gate, up, h = make(5, 37), make(5, 37), make(5, 74)
    copies = [x.detach().clone() for x in (gate, up, h)]
    y = kernels.geglu(gate, up) + kernels.swiglu_packed(h, "gate_up")
    first = torch.autograd.grad(y.sum(), (gate, up, h), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (gate, up, h))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for x, copy in zip((gate, up, h), copies, strict=True):
        assert torch.equal(x, copy)
        assert x._version == 0


@pytest.mark.parametrize("shape", [(4, 10), (0, 10), (2, 3, 10)], ids=str)
def test_opcheck(interpreted: None, shape: tuple[int, ...]) -> None:
    permuted = torch.randn(shape).mT.contiguous().mT.requires_grad_()
    for gate in (make(*shape), permuted):
        torch.library.opcheck(torch.ops.overlapkit.gated.default, (gate, make(*shape), "gelu"))
        torch.library.opcheck(torch.ops.overlapkit.gated_packed.default, (gate, "silu", False))


@pytest.mark.parametrize("module", [kernels.SwiGLU(), kernels.GeGLU("tanh", order="up_gate")], ids=str)
def test_compiled_in_one_graph_is_bitwise_the_same(path: str, module: torch.nn.Module) -> None:
    torch._dynamo.reset()
    inputs, grads = (make(5, 74), make(5, 74)), (torch.randn(5, 74),)
    if isinstance(module, kernels.GeGLU):
        inputs, grads = inputs[:1], (torch.randn(5, 37),)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(module, inputs, grads), run(compiled, inputs, grads), strict=True):
        assert torch.equal(a, b)


def test_recomputed_in_backward(interpreted: None) -> None:
    inputs, grads = (make(5, 74),), (torch.randn(5, 37),)

    def ours(h: Tensor) -> Tensor:
        return kernels.geglu_packed(h, "gate_up")

    def again(h: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(ours, h, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    for a, b in zip(run(ours, inputs, grads), run(again, inputs, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FAMILY)
def test_under_autocast_the_dtype_is_torchs(path: str, name: str) -> None:
    ours, torchs = FAMILY[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            gate, up = make(2, 8, dtype=dtype), make(2, 8, dtype=dtype)
            assert ours(gate, up).dtype == torchs(gate, up).dtype == dtype


def test_modules(path: str) -> None:
    gate, up = make(5, 8), make(5, 8)
    assert torch.equal(kernels.SwiGLU()(gate, up), kernels.swiglu(gate, up))
    assert torch.equal(kernels.GeGLU()(gate, up), kernels.geglu(gate, up))
    packed = kernels.GeGLU(approximate="tanh", order="up_gate")
    assert torch.equal(packed(gate), kernels.geglu_packed(gate, "up_gate", "tanh"))
    assert repr(packed) == "GeGLU(approximate='tanh', order='up_gate')"
    assert repr(kernels.SwiGLU()) == "SwiGLU()"
    with pytest.raises(TypeError, match=r"SwiGLU\(order=None\) takes gate and up"):
        kernels.SwiGLU()(gate)
    with pytest.raises(TypeError, match=r"SwiGLU\(order='gate_up'\) takes one packed tensor"):
        kernels.SwiGLU("gate_up")(gate, up)
    with pytest.raises(ValueError, match="order='gate'"):
        kernels.SwiGLU("gate")
    with pytest.raises(ValueError, match="approximate='erf'"):
        kernels.GeGLU("erf")


@pytest.mark.parametrize(
    ("gate", "up", "error", "message"),
    [
        (torch.ones(2, 4), torch.ones(4), ValueError, r"up has shape \(4,\): gate needs \(2, 4\)"),
        (torch.ones(4), torch.ones(4).half(), ValueError, "up has dtype torch.float16, gate torch.float32"),
        (torch.ones(4), torch.ones(4, device="meta"), ValueError, "up is on meta"),
        (torch.ones(4).int(), torch.ones(4), ValueError, "gate has dtype torch.int32"),
        (torch.ones(4), None, TypeError, "up is a NoneType"),
    ],
)
def test_bad_input(path: str, gate: Any, up: Any, error: type[Exception], message: str) -> None:
    for fn in (kernels.swiglu, kernels.geglu):
        with pytest.raises(error, match=message):
            fn(gate, up)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.ones(2, 5)}, ValueError, "x has 5 columns: an even number is needed"),
        ({"x": torch.ones(2, 4).int()}, ValueError, "x has dtype torch.int32"),
        ({"x": None}, TypeError, "x is a NoneType"),
        ({"order": "gate"}, ValueError, "order='gate': allowed are 'gate_up'"),
        ({"approximate": "erf"}, ValueError, "approximate='erf': allowed are 'none' and 'tanh'"),
    ],
)
def test_bad_packed_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.geglu_packed(**{"x": torch.ones(2, 4), "order": "gate_up", **arguments})
