"""Transforms of torch.func and forward mode, for which operators of torch.library have no rules."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from tests.ranks import one_rank_group

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's, of forward mode

TARGET = torch.tensor([0, 1, 5])
COS, SIN = torch.tensor([[0.6, 0.8, -0.6]] * 3), torch.tensor([[0.8, 0.6, 0.8]] * 3)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: kernels.cross_entropy(x, TARGET),
    "cross_entropy z_loss": lambda x: kernels.cross_entropy(x, TARGET, z_loss=0.1),
    "dropout_add": lambda x: kernels.dropout_add(x.sin(), x, 0.5, 1),
    "geglu": lambda x: kernels.geglu(x, x.sin()),
    "layer_norm": lambda x: kernels.layer_norm(x),
    "rms_norm": lambda x: kernels.rms_norm(x, eps=1e-6),
    "rope": lambda x: kernels.rope(x[:, None], x[:, None], COS, SIN)[0],
    "softmax": lambda x: kernels.softmax(x, scale=0.5),
    "swiglu_packed": lambda x: kernels.swiglu_packed(x, "gate_up"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_and_gradients_of_samples_are_those_of_autograd(path: str, name: str) -> None:
    """Without a rule a forward-mode derivative would be zero, and nobody would be told."""
    fn, x, tangent = FUNCTIONS[name], torch.randn(2, 3, 6), torch.randn(3, 6)
    found = torch.func.vmap(torch.func.grad(lambda one: fn(one).square().sum()))(x)
    for one, gradient in zip(x, found, strict=True):
        leaf = one.double().requires_grad_()
        (right,) = torch.autograd.grad(fn(leaf).square().sum(), leaf)
        torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=1e-4)
    y, dy = torch.func.jvp(fn, (x[0],), (tangent,))
    torch.testing.assert_close(y, fn(x[0]))
    jacobian = torch.autograd.functional.jacobian(fn, x[0].double())
    right = torch.tensordot(jacobian, tangent.double(), dims=2)
    torch.testing.assert_close(dy.double(), right, rtol=1e-4, atol=1e-4)


def test_what_is_an_operator_everywhere_says_so() -> None:
    x, weight = torch.randn(3, 6), torch.randn(6, 6)

    def head(x: Tensor) -> Tensor:
        loss: Tensor = kernels.linear_cross_entropy(x, weight, TARGET)
        return loss

    message = "linear_cross_entropy cannot be transformed by torch.func .*: use F.cross_entropy"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(head, (x,), (x,))
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(head)(x)
    with one_rank_group():
        sharded = {"vocab_group": torch.distributed.group.WORLD}
        with pytest.raises(
            RuntimeError, match="the loss of a vocab_group cannot be transformed by torch.func"
        ):
            torch.func.jvp(lambda x: kernels.cross_entropy(x, TARGET, **sharded), (x,), (x,))
    assert F.cross_entropy(F.linear(x, weight), TARGET).isclose(head(x))
