"""What selective recomputation keeps: results that cost far more to compute again than to hold."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

# By name: not every version and build of torch has all of them, and some are of other packages.
_COSTLY = frozenset(
    {
        # matrix products and convolutions
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_grouped_mm_v2",
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::addmm",
        "aten::baddbmm",
        "aten::bmm",
        "aten::convolution",
        "aten::linear",
        "aten::mm",
        "overlapkit::linear_cross_entropy",
        "overlapkit::linear_cross_entropy_rows",
        # attention
        "aten::_cudnn_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flex_attention",
        "torch_attn::_varlen_attn",
        # Between ranks: tensor and expert parallelism. An all-gather's result is as large as what sequence
        # parallelism saves, so it is gathered again.
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::reduce_scatter_tensor",
    }
)


def save_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy function of torch's `create_selective_checkpoint_contexts`."""
    name = operator.name().partition(".")[0]
    keep = name in _COSTLY and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it drops out: kept, it would draw nothing in backward, and later dropouts other numbers."""
    schema = getattr(operator, "_schema", None)  # operators of higher order have none
    if schema is None:
        return False
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False
