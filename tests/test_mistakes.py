"""Ten natural mistakes: the message alone says what, where, what is allowed, and what to do.

Each case names what the message must have in it. A mistake that is refused is refused before anything has
happened; one that is only likely is warned of.
"""

import copy
import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import overlapkit as ok
from tests.ranks import one_rank_group

DATA = TensorDataset(torch.zeros(16, 4))


def batches():
    return DataLoader(DATA, 4, sampler=ok.ElasticSampler(DATA))


def made(width=8):
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    return {"model": model, "optimizer": ok.AdamW(model.parameters())}


def wrong_device(folder):
    ok.DeviceLoader(batches(), "gpu")


def no_gpu(folder):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    ok.DeviceLoader(batches(), "cuda")


def typo(folder):
    ok.Checkpointer(folder, evry=100)


def typo_in_a_function(folder):
    ok.shard(made()["model"], prefetch_forward=2)


def shard_after_the_optimizer(folder):
    state = made()
    with one_rank_group():
        ok.shard(state["model"])


def another_model(folder):
    with ok.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, made())
    with ok.Checkpointer(folder) as checkpointer:
        checkpointer.restore(made(width=16))


def no_space_left(folder):
    """A limit on the size of files stands for a full disk; the writer meets both in the same call."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with ok.Checkpointer(folder) as checkpointer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
            checkpointer.save(20, {"model": nn.Linear(512, 512)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        assert not [path for path in folder.iterdir() if path.name.startswith("step-")]


REFUSED = {
    wrong_device: (ValueError, ["device='gpu'", "'cpu', 'cuda', 'cuda:N'"]),
    no_gpu: (ValueError, ["device='cuda'", "sees no CUDA device", "use device='cpu' or None"]),
    typo: (
        TypeError,
        ["Checkpointer has no option evry", "did you mean every?", "It takes directory, local"],
    ),
    typo_in_a_function: (TypeError, ["shard has no option prefetch_forward", "forward_prefetch"]),
    shard_after_the_optimizer: (ValueError, ["are in a AdamW already", "call shard first, then make the"]),
    another_model: (
        RuntimeError,
        ["step-1 does not fit the state", "only=", "strict=False", "0.weight", "(16, 4)", "(8, 4)"],
    ),
    no_space_left: (
        OSError,
        [
            "step-20 in '{folder}' takes 1.0 MiB",
            "MiB are free",
            "Earlier checkpoints are as they were",
            "keep=",
        ],
    ),
}


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_refused_in_words_that_are_enough(mistake, tmp_path):
    kind, words = REFUSED[mistake]
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    message = str(caught.value)
    assert [word for word in words if word.replace("{folder}", str(tmp_path)) not in message] == [], message


def test_a_full_disk_keeps_its_error_number(tmp_path):
    with pytest.raises(OSError, match="File too large") as caught:
        no_space_left(tmp_path)
    assert caught.value.errno == errno.EFBIG


def test_set_epoch_forgotten_is_warned_of_once():
    loader = ok.DeviceLoader(batches(), "cpu")
    list(loader)
    with pytest.warns(
        UserWarning, match=r"epoch 0 begins again, in the same order .* call loader\.set_epoch"
    ):
        list(loader)
    list(loader)


@pytest.mark.parametrize("shuffle", [True, False])
def test_set_epoch_remembered_or_without_a_meaning_is_not_warned_of(shuffle):
    loader = ok.DeviceLoader(DataLoader(DATA, 4, sampler=ok.ElasticSampler(DATA, shuffle=shuffle)), "cpu")
    for epoch in range(3):
        if shuffle:
            loader.set_epoch(epoch)
        list(loader)


def test_two_jobs_in_one_directory_are_told_of_each_other(tmp_path):
    with ok.Checkpointer(tmp_path) as first:
        first.save(1, made(), block=True)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: done on purpose
            child = os.fork()
        if not child:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                second = ok.Checkpointer(tmp_path)
                second.latest()  # reading is nobody's concern
                quiet = len(caught)
                second._lock.saves()
            os.write(writer, f"{quiet} {caught[-1].message}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        said = os.read(reader, 10_000).decode()
        os.close(reader)
    assert said.startswith(f"0 directory={str(tmp_path)!r}: another job saves here")
    assert f"process {os.getpid()} on " in said
    assert "give each a directory of its own" in said


def test_jobs_one_after_the_other_and_one_that_only_reads_are_not(tmp_path):
    for step in (1, 2):
        with ok.Checkpointer(tmp_path) as checkpointer, ok.Checkpointer(tmp_path) as reading:
            checkpointer.save(step, made(), block=True)
            assert reading.restore(made()) == step


LOOP = """
    import sys, time, torch
    from torch import nn
    import overlapkit as ok
    model = nn.Linear(4, 4)
    opt = ok.AdamW(model.parameters())
    data = [torch.zeros(2, 4)] * 100_000
    loader = ok.DeviceLoader(data, "cpu")
    ckpt = ok.Checkpointer(sys.argv[1], every=10, keep=2)
    meter = ok.StepMeter(model, opt, loader, ckpt)
    step = 0
    for x in loader:
        with meter.step():
            model(x).sum().backward(); opt.step(); opt.zero_grad()
        step += 1
        ckpt.save(step, {"model": model, "optimizer": opt})
        if step == 100:
            print("training", flush=True)
"""


def test_ctrl_c_twice_ends_the_job_and_leaves_what_was_saved(tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LOOP), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout.readline() == "training\n"
    for _ in range(2):
        job.send_signal(signal.SIGINT)
        time.sleep(0.02)  # nobody presses faster
    _, said = job.communicate(timeout=100)
    assert job.returncode != 0
    assert said.rstrip().splitlines()[-1].startswith("KeyboardInterrupt")
    assert "overlapkit-" not in said  # no thread of ours adds a traceback of its own
    with ok.Checkpointer(tmp_path) as checkpointer:
        state = made_linear()
        assert checkpointer.restore(state) >= 90
    assert torch.isfinite(state["model"].weight).all()


def made_linear():
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": ok.AdamW(model.parameters())}


def test_an_old_torch_is_one_error_at_the_import():
    """And a new one, a nightly or a vendor's build is none."""
    source = (Path(ok.__file__)).read_text()
    code = """
        import sys, types
        source = sys.stdin.read()
        for version in sys.argv[1:]:
            sys.modules["torch"] = types.SimpleNamespace(__version__=version)
            module = types.ModuleType("overlapkit")
            sys.modules["overlapkit"] = module
            try:
                exec(compile(source, "overlapkit/__init__.py", "exec"), vars(module))
                print("fine")
            except ImportError as error:
                print(error)
    """
    versions = [
        "2.4.0+cu121",
        "2.10.1",
        "1.13.1",
        "2.11.0",
        "2.14.0.dev20260901+cu130",
        "2.12.0a0+5d1.nv26.5",
    ]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *versions],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    for version, line in zip(versions[:3], lines, strict=False):
        assert f"needs torch 2.11 or newer, and this is torch {version}: pip install --upgrade torch" in line
    assert lines[3:] == ["fine"] * 3


MADE = {
    "loader": lambda folder: ok.DeviceLoader(batches(), "cpu"),
    "checkpointer": ok.Checkpointer,
    "meter": lambda folder: ok.StepMeter(made()["model"]),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_owns_threads_and_files_is_not_copied(make, tmp_path):
    """A module that holds one may be copied (by torch's AveragedModel) or given to a spawned process."""
    holder = nn.Identity()
    holder.part = make(tmp_path)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a \w+ cannot be copied or pickled: .* [Mm]ake one"):
            copied(holder)
    holder.part.close()
