"""One graph of torch.compile for every size: what is asked about shapes may neither break nor fix it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overlapkit import kernels

WEIGHT, TABLE = torch.linspace(0.5, 1, 8), torch.linspace(-1, 1, 36).view(9, 4)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.int64)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: kernels.cross_entropy(x, zeros(x), WEIGHT),
    "cross_entropy_": lambda x: kernels.cross_entropy_(x * 1, zeros(x)),
    "dropout_add": lambda x: kernels.dropout_add(x, x, 0.5, 1),
    "linear_cross_entropy": lambda x: kernels.linear_cross_entropy(x, torch.cat([TABLE, TABLE], 1), zeros(x)),
    "rms_norm": lambda x: kernels.rms_norm(x, WEIGHT),
    "rope of angles": lambda x: kernels.rope(x[None, :, None], x[None, :, None], TABLE, TABLE)[0],
    "rope of positions": lambda x: kernels.rope(
        x.expand(1, 3, *x.shape), x.expand(1, 3, *x.shape), TABLE, TABLE, torch.tensor([[2, 0, 1]])
    )[0],
    "softmax": lambda x: kernels.softmax(x, mask=torch.arange(8) > 2),
    "swiglu_packed": lambda x: kernels.swiglu_packed(x, "gate_up"),
}


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's own, about autograd.Function
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_for_all_sizes(name: str) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    fn = FUNCTIONS[name]
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=backend)
    for n in (6, 5, 7):  # a size that no other tensor has: Dynamo takes equal ones for one
        x = torch.randn(n, 8, requires_grad=True)
        assert torch.equal(compiled(x), fn(x))
    assert len(graphs) == 1
