"""Training in one process with every part at once gives the numbers of torch's own parts."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import overlapkit as ok
from tests.parallel.models import batch, gpt, loss_of


def test_autocast_in_fp16_with_a_grad_scaler_a_save_and_a_skipped_step(tmp_path: Path) -> None:
    """The scaler halves its scale, skips the step, and is part of what a checkpoint restores."""

    folder = tmp_path

    def run(ours: bool, stop: int | None = None, resume: bool = False) -> list[Any]:
        model = gpt()
        kind: Any = ok.AdamW if ours else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.01, **({"max_norm": 0.5} if ours else {"fused": True}))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        state = {"model": model, "optimizer": optimizer, "scaler": scaler}
        checkpointer = ok.Checkpointer(folder) if stop or resume else None
        first = checkpointer.restore(state) if checkpointer and resume else 0
        seen: list[Any] = []
        for step in range(first, 8):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, batch(step))
            scaler.scale(loss).backward()
            if step == 2:
                next(model.parameters()).grad[0, 0] = float("inf")
            if not ours:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((loss.item(), scaler.get_scale()))
            if checkpointer and not resume:
                checkpointer.save(step + 1, state)
                if step + 1 == stop:
                    break
        if checkpointer:
            checkpointer.close()
        return [*seen, [p.detach().clone() for p in model.parameters()]]

    ours, theirs = run(True), run(False)
    assert [scale for _, scale in ours[:-1]] == [scale for _, scale in theirs[:-1]]
    assert ours[2][1] == ours[1][1] / 2
    torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-5, rtol=1e-5)
    for stop in (3, 4):  # right after the skipped step, and later
        folder = tmp_path / str(stop)
        before = run(True, stop=stop)
        after = run(True, resume=True)
        assert [*before[:-1], *after[:-1]] == ours[:-1]
        assert all(map(torch.equal, after[-1], ours[-1]))


@pytest.mark.parametrize("how", ["in place", "replaced", "scheduler"])
def test_a_learning_rate_that_is_a_tensor_is_read_at_each_step_and_saved(tmp_path: Path, how: str) -> None:
    def run(kind: Any, resume: bool = False, **options: Any) -> list[torch.Tensor]:
        model = gpt()
        rate = torch.tensor(0.01)
        optimizer = kind(model.parameters(), lr=rate, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6) if how == "scheduler" else None
        state = {"model": model, "optimizer": optimizer} | ({"scheduler": scheduler} if scheduler else {})
        saved = ok.Checkpointer(tmp_path / how) if kind is ok.AdamW else None
        first = saved.restore(state) if saved and resume else 0
        for step in range(first, 6):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            elif how == "in place":
                optimizer.param_groups[0]["lr"].mul_(0.5)
            else:
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
            if saved and step + 1 == 3 and not resume:
                saved.save(3, state)
        if saved:
            saved.close()
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        return [p.detach().clone() for p in model.parameters()]

    truth, ours = run(torch.optim.AdamW, fused=True), run(ok.AdamW)
    assert all(map(torch.equal, ours, truth))
    assert all(map(torch.equal, run(ok.AdamW, resume=True), ours))


def test_evaluation_hooks_and_everything_at_once_change_no_bit(tmp_path: Path) -> None:
    """Loader, meter, saves, an evaluation and an averaged copy: the loss is that of the bare loop."""

    def run(everything: bool) -> list[float]:
        model = gpt(frozen=("blocks.0",))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = ok.AdamW(trained, lr=0.01, max_norm=1.0)
        data: Any = [batch(step) for step in range(8)]
        losses: list[float] = []
        if not everything:
            for tokens in data:
                loss = loss_of(model, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses
        average = copy.deepcopy(model)
        loader = ok.DeviceLoader(data, "cpu", depth=3)
        with ok.Checkpointer(tmp_path, every=2, keep=2) as checkpointer:
            meter = ok.StepMeter(model, optimizer, loader, checkpointer, on_log=[lambda _, v: None])
            state = {"model": model, "optimizer": optimizer, "average": average, "loader": loader}
            for step, tokens in enumerate(meter.steps(loader), start=1):
                loss = loss_of(model, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad(), meter.pause():
                    loss_of(model.eval(), batch(99))
                    model.train()
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.data.lerp_(theirs.data, 0.1)
                meter.log(loss=loss)
                checkpointer.save(step, state)
                losses.append(loss.item())
            meter.close()
        return losses

    assert run(True) == run(False)


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(part) for part in torch.arange(2.0 * count).split(2))


@pytest.mark.timeout(600)  # 15 s on a quiet core
def test_a_hundred_thousand_parameters_train_save_and_come_back(tmp_path: Path) -> None:
    model = Many(100_000)
    optimizer = ok.AdamW(model.parameters(), lr=0.5, max_norm=1e9)
    parts = list(model.parameters())
    for part in parts:
        part.grad = torch.ones(2)
    with ok.Checkpointer(tmp_path) as checkpointer:
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(200_000**0.5)
        truth = torch.arange(200_000.0) * (1 - 0.5 * 0.01) - 0.5
        saved = torch.cat([part.detach() for part in parts])
        torch.testing.assert_close(saved, truth, atol=1e-4, rtol=1e-6)
        checkpointer.save(1, {"model": model})
        optimizer.step()
        assert not torch.equal(torch.cat([part.detach() for part in parts]), saved)
        assert checkpointer.restore({"model": model}) == 1
    assert torch.equal(torch.cat([part.detach() for part in parts]), saved)


def test_twice_the_parameters_cost_twice_the_calls(tmp_path: Path) -> None:
    """Counted, not timed: from the optimizer to the last restore nothing grows faster than the model."""

    def calls(count: int, folder: Path) -> dict[str, int]:
        model = Many(count)
        for part in model.parameters():
            part.grad = torch.ones(2)
        counts: dict[str, int] = {}

        def counted(name: str, work: Callable[[], Any]) -> Any:
            number = 0

            def count_calls(frame: object, event: str, arg: object) -> None:
                nonlocal number
                number += event in ("call", "c_call")

            before = sys.getprofile()
            sys.setprofile(count_calls)
            try:
                return work()
            finally:
                sys.setprofile(before)
                counts[name] = number

        optimizer = counted("optimizer", lambda: ok.AdamW(model.parameters(), max_norm=1.0))
        state = {"model": model, "optimizer": optimizer}
        with ok.Checkpointer(folder) as checkpointer:
            counted("first step", optimizer.step)
            counted("save", lambda: checkpointer.save(1, state, block=True))
            counted("step", optimizer.step)
            counted("restore", lambda: checkpointer.restore(state))
        return counts

    calls(10, tmp_path / "warm")
    few, many = calls(300, tmp_path / "few"), calls(600, tmp_path / "many")
    assert {name: many[name] / few[name] for name in few if many[name] > 2.1 * few[name]} == {}
