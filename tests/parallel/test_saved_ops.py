"""Which results selective recomputation keeps."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from overlapkit.parallel.saved_ops import _COSTLY, save_costly

aten = torch.ops.aten
KEEP, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

CASES = [
    (aten.mm.default, (), {}, KEEP),
    (aten.addmm.out, (), {}, KEEP),
    (aten.convolution.default, (), {}, KEEP),
    (aten.gelu.default, (), {}, AGAIN),
    (aten.native_layer_norm.default, (), {}, AGAIN),
    (aten._scaled_dot_product_flash_attention.default, (1, 2, 3), {}, KEEP),
    (aten._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.0), {}, KEEP),
    (aten._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.1), {}, AGAIN),
    (aten._scaled_dot_product_efficient_attention.default, (1, 2, 3, None, True), {"dropout_p": 0.1}, AGAIN),
    (aten._scaled_dot_product_cudnn_attention.default, (1, 2, 3, None, True), {"dropout_p": 0.0}, KEEP),
    (torch.ops._c10d_functional.reduce_scatter_tensor.default, (), {}, KEEP),
    (torch.ops._c10d_functional.all_gather_into_tensor.default, (), {}, AGAIN),
    (torch.ops.higher_order.flex_attention, (), {}, KEEP),
]


@pytest.mark.parametrize(("operator", "args", "kwargs", "wanted"), CASES)
def test_policy(operator: Any, args: Any, kwargs: Any, wanted: CheckpointPolicy):
    import torch.nn.attention.flex_attention  # noqa: F401  registers one of them

    assert save_costly(None, operator, *args, **kwargs) == wanted


def test_every_name_of_torch_and_of_ours_is_one():
    import overlapkit.kernels.linear_cross_entropy_ops  # noqa: F401  registers them

    there = {schema.name for schema in torch._C._jit_get_all_schemas()}
    named = {name for name in _COSTLY if name.startswith(("aten::", "_c10d_functional::", "overlapkit::"))}
    assert len(named) > 20
    assert named <= there
