"""A month of saves in miniature: memory, threads, descriptors and the store stay as they are."""

import gc
import os
import threading
from pathlib import Path

import torch

from overlapkit.checkpoint import Checkpointer
from tests.ranks import run_ranks


def small_state():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "n": [0]}


def held():
    """(descriptors, threads, bytes in memory, objects) of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return files, threading.active_count(), pages * os.sysconf("SC_PAGESIZE"), len(gc.get_objects())


def live_through(checkpointer, state, steps):
    for step in steps:
        loss = state["model"](torch.ones(4, 8)).sum()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["n"].append(step)
        del state["n"][:-3]
        checkpointer.save(step, state, metrics={"loss": loss.item()})
        checkpointer.timings()
    checkpointer.wait()


def assert_flat(before, halfway, after):
    """What leaks grows in both halves; an allocator's arena grows once, at any time."""
    assert after[:2] == before[:2]
    assert min(halfway[2] - before[2], after[2] - halfway[2]) < 2 << 20
    assert abs(after[3] - before[3]) < 200


def test_a_thousand_saves(scratch):
    state = small_state()
    with Checkpointer(scratch, keep=2, keep_every=400, in_flight=2) as checkpointer:
        live_through(checkpointer, state, range(200))
        before = held()
        live_through(checkpointer, state, range(200, 700))
        halfway = held()
        live_through(checkpointer, state, range(700, 1200))
        assert_flat(before, halfway, held())
        assert checkpointer.steps() == [0, 400, 800, 1198, 1199]
        other = small_state()
        assert checkpointer.restore(other) == 1199
    assert other["n"] == [1197, 1198, 1199]


def test_hundreds_of_saves_on_two_ranks(scratch):
    def work(rank):
        state = small_state()
        with Checkpointer(scratch, keep=2, in_flight=2) as checkpointer:
            live_through(checkpointer, state, range(50))
            keys, before = checkpointer._quorum.store.num_keys(), held()
            live_through(checkpointer, state, range(50, 200))
            halfway = held()
            live_through(checkpointer, state, range(200, 350))
            assert_flat(before, halfway, held())
            assert abs(checkpointer._quorum.store.num_keys() - keys) <= 4
            return checkpointer.steps()

    first, second = run_ranks(2, work)
    assert first == [348, 349]
    assert second[-2:] == [348, 349]  # rank 0 deletes, after it has told the others of the commit
