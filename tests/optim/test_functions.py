"""clip_grad_norm_ against torch's, adamw as a function, and what both refuse."""

from typing import Any

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.optim import adamw, adamw_state, clip_grad_norm_, global_norm


def parameters(dtypes: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    shapes = [(3, 700), (5,), (), (0, 2), (33, 4)]
    params = [nn.Parameter(torch.zeros(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]
    for param in params:
        param.grad = torch.randn(param.shape).to(param)
    return [*params, nn.Parameter(torch.zeros(3))]  # and one without a gradient


@pytest.mark.parametrize("kind", [2.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.3, 1e5])
def test_clipping_is_torchs(kind: float, max_norm: float, path: str) -> None:
    ours = parameters((torch.float32,))
    theirs = [nn.Parameter(p.detach()) for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    norm = clip_grad_norm_(ours, max_norm, kind)
    some = [q for q in theirs if q.numel()]  # torch has no infinity norm of nothing
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(some, max_norm, kind))
    torch.testing.assert_close([p.grad for p in ours], [q.grad for q in theirs])


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_norms_of_half_precision_are_those_of_fp32(kind: float, path: str) -> None:
    params = parameters((torch.bfloat16, torch.float32, torch.float16))
    params[-1].grad = torch.randn(6)[::2]  # not dense: torch's way
    for some in (params[:-1], params):
        grads = [p.grad.double() for p in some if p.grad is not None]
        assert len(grads) >= 5
        truth = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), kind)
        norm = clip_grad_norm_(some, 0.1, kind)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.double(), truth, rtol=1e-6, atol=0)
        for p, grad in zip(some, grads, strict=True):
            eps = torch.finfo(p.grad.dtype).eps
            torch.testing.assert_close(p.grad.double(), grad * (0.1 / (truth + 1e-6)), rtol=eps, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_norms_that_are_not_finite(bad: float, kind: float, path: str) -> None:
    for error in (True, False):
        params = parameters((torch.float32,))
        params[0].grad[1, 5] = bad
        if error:
            with pytest.raises(RuntimeError, match="norm of type"):
                clip_grad_norm_(params, 1.0, kind, error_if_nonfinite=True)
        else:
            norm = clip_grad_norm_(params, 1.0, kind)
            assert torch.equal(norm, torch.tensor(bad)) or (norm.isnan() and bad != bad)
            assert params[0].grad[1, 5].isnan()


def test_nothing_to_clip_and_what_is_refused(path: str) -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0
    assert global_norm([]).item() == 0
    params = parameters((torch.float32,))
    assert clip_grad_norm_(params[1], 1e9) == params[1].grad.norm()
    with pytest.raises(ValueError, match="norm_type=1: allowed are 2 and inf"):
        clip_grad_norm_(params, 1.0, 1)
    with pytest.raises(ValueError, match="max_norm=0 must be above 0"):
        clip_grad_norm_(params, 0)
    with pytest.raises(TypeError, match="max_norm is a tensor"):
        clip_grad_norm_(params, torch.ones(()))
    params[0].grad = torch.zeros(3, 700).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        clip_grad_norm_(params, 1.0)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16_sr", "moments": "int8"}], ids=str)
def test_the_function_does_what_the_class_does(options: dict[str, Any], path: str) -> None:
    ours = [nn.Parameter(torch.randn(s).bfloat16()) for s in ((3, 130), (7,))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    states, optimizer = adamw_state(ours, **options), ok.AdamW(theirs, lr=1e-2, max_norm=1.0, **options)
    for _ in range(3):
        for q in theirs:
            q.grad = torch.randn(q.shape).bfloat16()
        norm = adamw(ours, [q.grad for q in theirs], states, lr=1e-2, max_norm=1.0, **options)
        optimizer.step()
        assert torch.equal(norm, optimizer.grad_norm)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_the_function_refuses_what_the_class_refuses() -> None:
    param, grad = torch.zeros(3), torch.zeros(3)
    states = adamw_state([param])
    for message, call in {
        "1, 0 and 1 entries": lambda: adamw([param], [], states),
        "lr=-1": lambda: adamw([param], [grad], states, lr=-1),
        "precision='x'": lambda: adamw([param], [grad], states, precision="x"),
        "is for bf16 parameters": lambda: adamw([param], [grad], states, precision="bf16_sr"),
        r"states\[0\] holds \['exp_avg', 'exp_avg_sq', 'step'\]": lambda: adamw(
            [param], [grad], states, amsgrad=True
        ),
        "a torch.float64 parameter": lambda: adamw([param.double()], [grad], states),
        "complex64": lambda: adamw([param + 0j], [grad], states),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="sparse"):
        adamw([param], [grad.to_sparse()], states)
    assert adamw_state([]) == []
