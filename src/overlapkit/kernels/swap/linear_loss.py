"""What `swap` makes of torch.nn.LinearCrossEntropyLoss (torch 2.13); imported where there is one."""

from typing import Any

from torch import Tensor, nn

from overlapkit.kernels.linear_head import linear_cross_entropy


class FusedLinearCrossEntropyLoss(nn.LinearCrossEntropyLoss):
    """torch.nn.LinearCrossEntropyLoss through `linear_cross_entropy`."""

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """Return the loss of input (..., D) and target (...). Class probabilities are left to torch."""
        if target.is_floating_point():
            return super().forward(input, target)
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


OF_TORCH: dict[type[nn.Module], type[nn.Module]] = {nn.LinearCrossEntropyLoss: FusedLinearCrossEntropyLoss}


def why_not(module: nn.Module) -> str | None:
    """Why such a loss is left to torch."""
    if module.out_features:
        return f"out_features={module.out_features}: only losses of one linear layer's rows are fused"
    if module.options is not None:
        return "its options say how torch takes it in chunks: make it without options"
    return None
