"""What it costs one rank of many to plan a save and a load: part of benchmarks/checkpoint.py.

torch's fake process group makes one process believe that it is a rank of a mesh of 8 to 4,096; nothing is
sent. The other ranks' reports and manifest parts are generated: they are this one's, with other offsets.
DCP plans on every rank and then once more, on one, over what all ranks planned: that is its global plan.
"""

import dataclasses
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlapkit.checkpoint.catalog import Catalog
from overlapkit.checkpoint.codec import dump
from overlapkit.checkpoint.commit import commit
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.manifest import read_manifest
from overlapkit.checkpoint.match import make_plan, writers_of
from overlapkit.checkpoint.planner import Planner
from overlapkit.checkpoint.writer import held, write_share
from overlapkit.lane import Lane

RANK = 3  # whose costs are measured; it is in every mesh


def plan_times(ranks: int, tensors: int, dcp: bool) -> dict[str, float | None]:
    """Milliseconds of planning on one of so many ranks, with so many tensors sharded over all of them."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = context.Process(target=_measure, args=(ranks, tensors, dcp, theirs))
        process.start()
    theirs.close()
    try:
        answer: dict[str, float | None] = ours.recv()
    except EOFError:
        raise SystemExit(f"planning for {ranks} ranks and {tensors} tensors failed") from None
    process.join()
    return answer


def _measure(ranks: int, tensors: int, dcp: bool, result: Connection) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=ranks)
    state = _state(ranks, tensors)
    planner = Planner(RANK, late=True)
    found: dict[str, float | None] = {"first save": _ms(lambda: planner.take(state))}
    found["save"] = median(_ms(lambda: planner.take(state)) for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        found |= _collect(Path(folder), state, planner, ranks)
    found["dcp, global plan"] = _dcp(state, ranks) if dcp else None
    result.send(found)
    dist.destroy_process_group()


def _state(ranks: int, tensors: int) -> dict[str, Any]:
    """Modules whose parameters are sharded by rows; each rank has one row of four numbers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    layers = [nn.Module() for _ in range(tensors)]
    for layer in layers:
        local = torch.zeros(1, 4)
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        layer.weight = nn.Parameter(whole)
    model = nn.Sequential(*layers)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def _collect(folder: Path, state: dict[str, Any], planner: Planner, ranks: int) -> dict[str, float]:
    """What rank 0 does with the reports of all, and what a rank does to find its part again."""
    temporary = folder / ".tmp-0123456789ab-0"
    share = planner.take(state)
    memory = torch.zeros(share.plan.nbytes, dtype=torch.uint8)
    about = {"step": 1, "rank": RANK, "world": ranks, "rng": None}
    with Lane("benchmark", kind="inline") as helper:
        files = write_share(Disk(), temporary, share.plan, share.entries, held(memory), about, helper)
    reports = [_as_rank(rank, files) for rank in range(ranks)]
    for rank in {0, 1, 2} | set(range(4, ranks)):  # commit and read_manifest look at each file
        for name in files:
            made = temporary / name.replace(f"{RANK:05d}", f"{rank:05d}")
            if name.endswith(".json") and rank == 0:
                part = json.loads((temporary / name).read_text())
                made.write_text(dump(part | {"rank": 0}).replace(f"rank-{RANK:05d}", "rank-00000"))
            else:
                made.hardlink_to(temporary / name)
    texts = [json.dumps(report) for report in reports]

    def collect() -> None:
        all_files = {name: file for text in texts for name, file in json.loads(text).items()}
        commit(Disk(), temporary, 1, all_files, {"world": ranks, "metrics": {}})

    found = {"commit": _ms(collect)}

    def find() -> None:
        catalog = Catalog(read_manifest(folder / "step-1"), RANK, ranks, {RANK})
        plan = make_plan(state, catalog, None, Lane("place", kind="inline"))
        assert catalog.covers(plan.wanted)
        assert writers_of(state) == {0, RANK}

    found["load"] = median(_ms(find) for _ in range(3))
    return found


def _as_rank(rank: int, files: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(f"{RANK:05d}", f"{rank:05d}"): file for name, file in files.items()}


def _dcp(state: dict[str, Any], ranks: int) -> float:
    """DCP's coordinator: the global plan over all ranks' local plans, made with its plan caching off."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner({"model": state["model"].state_dict()}, is_coordinator=True)
    local = planner.create_local_plan()
    plans = [_moved(local, rank) for rank in range(ranks)]
    return _ms(lambda: planner.create_global_plan(plans))


def _moved(plan: Any, rank: int) -> Any:
    """A local plan as another rank makes it: of other rows."""
    items = []
    for item in plan.items:
        data = item.tensor_data
        chunk = dataclasses.replace(data.chunk, offsets=torch.Size([rank, *data.chunk.offsets[1:]]))
        index = dataclasses.replace(item.index, offset=chunk.offsets)
        items.append(
            dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(data, chunk=chunk))
        )
    return dataclasses.replace(plan, items=items)


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
