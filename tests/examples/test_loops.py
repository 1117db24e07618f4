"""The loops of Lightning, Accelerate and torchtitan around our parts, against a plain PyTorch loop.

The scripts are run as they stand, in forks of this process: torch is imported once.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import overlapkit as ok

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 5
SIZE = {"width": 32, "layers": 1, "window": 32, "batch": 4, "bytes": 1000}
SMALL = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]


def straight(step):
    return 1 - step / (STEPS + 1)


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


SCRIPTS = {
    "lightning_module.py": ("lightning", cosine),
    "accelerate_loop.py": ("accelerate", cosine),
    "torchtitan_storage.py": (None, straight),
}


@pytest.fixture(params=SCRIPTS)
def script(request):
    needs, _ = SCRIPTS[request.param]
    if needs and not find_spec(needs):
        pytest.skip(f"{needs} is not installed: pip install -e '.[examples]'")
    return request.param


def _child(script, words, out, environment):
    """A process of its own: what it prints and how it ends is in files."""
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP pool
    warnings.resetwarnings()
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, *words]
    with (
        open(out, "w", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise


def begin(script, folder, name, *options, ranks=1):
    """Start it in so many ranks, as torchrun would; returns what `end` takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*SMALL, "--steps", str(STEPS), "--save-every", "1", "--out", str(folder / name), *options]
    started = []
    for rank in range(ranks):
        job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        job |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": name}
        environment = {key: str(value) for key, value in job.items()} if ranks > 1 else {}
        printed = folder / f"{name}-{len(list(folder.iterdir()))}-{rank}.txt"
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_child, args=(script, words, printed, environment))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: done on purpose
            process.start()
        started.append((process, printed))
    return started


def end(started):
    """Rank 0's losses."""
    for process, _ in started:
        process.join(280)
        if process.is_alive():
            process.kill()
            process.join()
    printed = [file.read_text() for _, file in started]
    assert [process.exitcode for process, _ in started] == [0] * len(started), "\n".join(printed)
    (line,) = (line for line in printed[0].splitlines() if line.startswith("losses"))
    assert "1 batch ready" in printed[0]
    return [float(word) for word in line.split()[1:]]


def plainly(ranks, schedule, monkeypatch):
    """The truth: torch's own parts, in one process, all ranks' batches one after the other."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import gpt
    import text

    args = argparse.Namespace(**SIZE)
    torch.manual_seed(0)
    model = gpt.GPT(256, args.width, args.layers, heads=4, window=args.window)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    windows = text.Windows(text.standard_library()[0][: args.bytes], args.window)
    samplers = [ok.ElasticSampler(windows, ranks, rank) for rank in range(ranks)]
    losses = []
    for epoch in range(STEPS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(windows, args.batch, sampler=each, drop_last=True) for each in samplers]
        for batches in zip(*loaders, strict=True):
            found = [model(*text.inputs_and_targets(batch)) for batch in batches]
            (sum(found) / ranks).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            losses.append(found[0].item())
            if len(losses) == STEPS:
                return losses
    raise AssertionError("too few epochs")


@pytest.mark.timeout(900)
def test_the_losses_are_plain_torchs_also_when_resumed_and_on_two_ranks(script, tmp_path, monkeypatch):
    """31 windows are 7 batches for one rank, and 3 for each of two: two ranks begin a second epoch."""
    _, schedule = SCRIPTS[script]
    both = begin(script, tmp_path, "both", ranks=2)
    parts = end(begin(script, tmp_path, "alone", "--stop-at", "3"))
    assert len(parts) == 3
    parts += end(begin(script, tmp_path, "alone"))
    assert parts == pytest.approx(plainly(1, schedule, monkeypatch), rel=2e-5)
    assert end(both) == pytest.approx(plainly(2, schedule, monkeypatch), rel=2e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--width", "30"], "--width 30: give a multiple of 8"),
        (["--save-every", "0"], "--save-every 0: give at least 1"),
    ],
)
def test_bad_options_are_one_line(words, line, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["script", "--out", "unused", *words])
    import task

    with pytest.raises(SystemExit, match="2"):
        task.arguments("what it is")
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_too_little_text_is_one_line_and_no_loop_without_end(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import task

    with pytest.raises(SystemExit, match="--batch 32: 31 windows make no batch for each rank"):
        task.loader(argparse.Namespace(**SIZE | {"batch": 32}), "cpu")
