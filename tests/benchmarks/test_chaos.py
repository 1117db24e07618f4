"""The job under fire, for a minute; and that its judge finds what was planted."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import chaos_job
import chaos_rank
import chaos_run
from chaos_judge import Shape, judge, names_absent
from chaos_life import Life
from chaos_place import Place
from chaos_plan import ENDERS, KINDS, LAUNCHERS, Setting, faults, settings
from tests.ranks import run_ranks

SCRIPT = Path(chaos_run.__file__).with_name("chaos.py")
STEPS, EPOCH, WORLD = 8, 4, 2
SAMPLES = [f"sample {number}" for number in range(EPOCH * WORLD)]
SHAPE = Shape(STEPS, EPOCH, frozenset(SAMPLES), keep=2)
REFERENCES = {
    world: {
        step: [(4.0 - step / 10 + rank / 8).hex() for rank in range(world)] for step in range(1, STEPS + 1)
    }
    for world in (1, 2)
}


@pytest.mark.timeout(900)
def test_a_minute_under_fire(tmp_path: Path) -> None:
    report, scratch = tmp_path / "chaos.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, str(SCRIPT), "--quick", "--seed", "5", "--json", str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=850, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {figure["name"]: figure for figure in json.loads(report.read_text())["figures"]}
    assert found["wrong"]["value"] == found["samples lost"]["value"] == 0
    survived = {name.removeprefix("survived: "): one for name, one in found.items() if "survived: " in name}
    assert survived.pop(KINDS["freeze"])["value"] == 0  # it takes too long
    here = [one["value"] for one in survived.values() if one["value"] is not None]
    assert here
    assert all(here)
    assert found["faults injected"]["value"] == found["faults survived"]["value"] >= len(here)
    left = [path.name for path in scratch.iterdir()]
    assert [name for name in left if not name.startswith("torchelastic_")] == []  # a killed torchrun's logs


def rank_records(rank: int, world: int, begin: int, end: int, **start: Any) -> list[dict[str, Any]]:
    """The log of a rank that takes steps begin + 1 to end, and is told of each second checkpoint."""
    records: list[dict[str, Any]] = [{"kind": "born", "pid": 1}]
    if rank == 0:
        records.append({"kind": "found", "steps": start.pop("found", {})})
    names = [".run-0123456789ab.lock", "step-2"]
    records.append({"kind": "start", "step": begin, "warned": [], "names": names, **start})
    for step in range(begin + 1, end + 1):
        place = (step - 1) % EPOCH * WORLD
        mine = SAMPLES[place : place + WORLD][rank::world]
        usage = {"rss": 1000, "fds": 10}
        records.append({"kind": "step", "step": step, "loss": REFERENCES[world][step][rank], "samples": mine})
        records[-1] |= usage
        if step % 2 == 0:
            records.append({"kind": "committed", "step": step})
    return records


def right() -> list[Life]:
    """Killed after step 5, restored at 4, and run to the end."""
    first = {rank: rank_records(rank, 2, 0, 5) for rank in range(2)}
    second = {rank: rank_records(rank, 2, 4, STEPS, found={"2": "", "4": ""}) for rank in range(2)}
    for rank in range(2):
        second[rank].append({"kind": "over", "left": []})
    return [Life("1.0", 2, first, faults=[("kill", 1)]), Life("2.0", 2, second)]


def of(lives: list[Life], life: int, kind: str, rank: int = 0, at: int | None = None) -> dict[str, Any]:
    """One record, to be changed."""
    return next(
        one for one in lives[life].ranks[rank] if one["kind"] == kind and (at is None or one["step"] == at)
    )


def changed(life: int, kind: str, rank: int = 0, at: int | None = None, **values: Any) -> Callable[..., None]:
    return lambda lives: of(lives, life, kind, rank, at).update(values)


def flipped_bit(lives: list[Life]) -> None:
    record = of(lives, 0, "step", 1, 2)
    record["loss"] = (float.fromhex(record["loss"]) * (1 + 2**-52)).hex()


def grown(lives: list[Life]) -> None:
    for step, record in enumerate(one for one in lives[1].ranks[1] if one["kind"] == "step"):
        record["step"] += 100
        record["fds"] += 20 * step


def ended(*records: dict[str, Any], faults: tuple[tuple[str, int], ...]) -> Callable[[list[Life]], None]:
    """Both ranks of the first life end with these."""

    def plant(lives: list[Life]) -> None:
        lives[0].faults = list(faults)
        for rank in range(2):
            lives[0].ranks[rank] += records

    return plant


ENOSPC = {"kind": "save failed", "type": "OSError", "text": "[Errno 28] No space left on device"}
PLANTED = {
    "a skipped sample": (changed(1, "step", 1, 7, samples=[]), "epoch 1: 1 samples lost"),
    "a doubled sample": (
        changed(1, "step", 1, 7, samples=["sample 0"]),
        "epoch 1: 1 samples lost, 1 doubled",
    ),
    "a strange sample": (changed(0, "step", 0, 1, samples=["what is this?"]), "1 strange"),
    "a loss's last bit": (flipped_bit, "step 2 of life 1.0: loss"),
    "a lost checkpoint": (changed(1, "found", steps={"2": ""}), "step-4 was committed, and is gone"),
    "a torn checkpoint": (changed(1, "found", steps={"2": "", "4": "torn"}), "step-4 is damaged, and nobody"),
    "an older checkpoint taken": (changed(1, "start", 1, step=2), "the newest sound checkpoint is 4"),
    "a warning without need": (changed(1, "start", 1, warned=["odd"]), "warned without need"),
    "a leftover folder": (
        changed(1, "start", names=[".run-1", ".tmp-1-2", "step-2"]),
        "leftovers after a start",
    ),
    "a thread left": (changed(1, "over", left=["overlapkit-input"]), "threads are left"),
    "descriptors that grow": (grown, "fds of a rank grew from"),
    "an end for no reason": (ended(faults=()), "rank 0 ended, and nothing had happened"),
    "an end by what does not end": (ended(faults=(("stop", 0),)), "ended, and ['stop'] had happened"),
    "a save failing for no reason": (ended(ENOSPC, faults=(("stop", 0),)), "a save failed, and ['stop']"),
    "another error than the source's": (
        ended({"kind": "error", "type": "KeyError", "text": "'x'"}, faults=(("raise", 0),)),
        "no rank raised what its source did",
    ),
    "an error of the program": (
        ended({"kind": "error", "type": "KeyError", "text": "'x'"}, faults=(("kill", 0),)),
        "no fault explains KeyError: 'x'",
    ),
    "a signal that loses a step": (
        ended({"kind": "error", "type": "SystemExit", "text": "", "code": 143}, faults=(("term", 0),)),
        "after SIGTERM",
    ),
    "a crash": (
        lambda lives: setattr(lives[0], "output", "failed (exitcode: -6) local_rank: 0"),
        "a rank crashed: exitcode: -6",
    ),
    "a hang that names nobody": (ended(faults=(("freeze", 1),)), "nobody said that rank 1 is missing"),
}


def test_what_is_right_is_not_wrong() -> None:
    verdict = judge(right(), REFERENCES, SHAPE)
    assert (verdict.wrong, verdict.lost, verdict.doubled, verdict.repeated) == ([], 0, 0, 1)


@pytest.mark.parametrize("planted", PLANTED)
def test_the_judge_finds(planted: str) -> None:
    plant, words = PLANTED[planted]
    lives = copy.deepcopy(right())
    plant(lives)
    assert words in "\n".join(judge(lives, REFERENCES, SHAPE).wrong)


@pytest.mark.parametrize(
    ("said", "absent"),
    [
        ("  missing: rank 1: step 20, not heard of for 15.0 s", {1}),
        ("  missing: ranks 1, 3: step 20, not heard of for 15.0 s", {1, 3}),
        ("TimeoutError: rank(s) 2 did not come to batch 7 of a pass", {2}),
        ("failed on rank 0; rank 3 did not report a failure within 5 s", {3}),
        ("  missing: cannot be told: the host of rank 0, or of torchrun's rendezvous, is stopped, dead", {0}),
        ("  rank 1: step 20, forward", set()),
    ],
)
def test_who_is_named_absent(said: str, absent: set[int]) -> None:
    assert {rank for rank in range(4) if names_absent(said, rank)} == absent


def resized() -> list[Life]:
    """Two ranks to step 4, one from there on."""
    lives = right()
    rest = rank_records(0, 1, 4, STEPS, found={"2": "", "4": ""})
    for record in rest:
        if record["kind"] == "step":
            place = (record["step"] - 1) % EPOCH * WORLD
            record["samples"] = SAMPLES[place : place + WORLD]
    return [lives[0], Life("2.0", 1, {0: [*rest, {"kind": "over", "left": []}]})]


@pytest.mark.parametrize(("factor", "found"), [(1 + 1e-6, False), (1 + 1e-3, True)])
def test_other_ranks_are_compared_within_rounding(factor: float, found: bool) -> None:
    lives = resized()
    record = of(lives, 1, "step", 0, 6)
    record["loss"] = (float.fromhex(record["loss"]) * factor).hex()
    assert any("step 6" in text for text in judge(lives, REFERENCES, SHAPE).wrong) is found


def test_a_flipped_byte_must_be_spoken_of() -> None:
    lives = right()
    lives[1].flipped = {6}
    of(lives, 1, "found")["steps"]["6"] = "damaged"
    silent = judge(lives, REFERENCES, SHAPE).wrong
    assert len(silent) == 2  # by neither rank
    assert "nothing was said of damaged step-6" in silent[0]
    for rank in range(2):
        of(lives, 1, "start", rank)["warned"] = ["step-6 is damaged and is skipped: byte 3"]
    assert judge(lives, REFERENCES, SHAPE).wrong == []


def test_a_header_that_only_other_readers_need_keeps_nobody_from_a_checkpoint() -> None:
    lives = right()
    lives[1].flipped = {4}
    of(lives, 1, "found")["steps"]["4"] = "rank-00000.safetensors: the checksum of its header differs from"
    assert judge(lives, REFERENCES, SHAPE).wrong == []
    lives[1].flipped = set()
    assert "step-4 is damaged, and nobody did that" in judge(lives, REFERENCES, SHAPE).wrong[0]


def test_orphans_are_found_and_ended() -> None:
    def work(rank: int) -> tuple[list[str], list[int]]:
        chaos_job.adopt_orphans()
        family = chaos_job.Descendants()
        shell = subprocess.Popen(["sh", "-c", "sleep 1000 & exit 0"], start_new_session=True)
        shell.wait()
        return family.orphans(patience_s=0.5), chaos_job.descendants()

    [(named, left)] = run_ranks(1, work)
    assert len(named) == 1
    assert "sleep 1000" in named[0]
    assert left == []


def test_a_hang_is_ended_with_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs_here(path: str) -> None:
        spec = chaos_rank.Spec(**json.loads(Path(path).read_text()))
        chaos_rank.Log(spec, int(os.environ["RANK"]))("born", pid=os.getpid())
        time.sleep(1000)

    monkeypatch.setattr(chaos_rank, "main", hangs_here)
    monkeypatch.setattr(chaos_run, "BOUND_S", 1.0)
    (tmp_path / "data").mkdir()

    def work(rank: int) -> tuple[list[str], str]:
        chaos_job.adopt_orphans()
        place = Place(tmp_path / "run", tmp_path / "data", own_disk=False)
        folders = {"store": str(place.run), "data": str(place.data), "control": str(place.control)}
        numbers = {"steps": 8, "window": 4, "batch": 2, "every": 2, "keep": 2}
        waits = {"deadline": 5.0, "patience": 5.0, "hang": 5.0}
        spec = chaos_rank.Spec(
            **folders, **numbers, **waits, logs=str(place.logs), life=0, wrap="shard", stop=False
        )
        run = chaos_run.Run(Setting(0, "fork", "shard", (2,), False), iter(()), place, spec, SHAPE)
        return run.go(REFERENCES).verdict.wrong, (place.logs / "0001.0-1.stacks").read_text()

    [(wrong, stacks)] = run_ranks(1, work)
    assert len(wrong) == 1
    assert "life 1 hangs" in wrong[0]
    assert "hangs_here" in stacks


def test_a_seed_gives_one_plan() -> None:
    runs = list(islice(settings(3, [2, 4], LAUNCHERS, quick=False), 24))
    assert runs == list(islice(settings(3, [2, 4], LAUNCHERS, quick=False), 24))
    assert {(run.launcher, run.worlds) for run in runs[:12]} == {
        (launcher, worlds) for launcher in LAUNCHERS for worlds in ((2,), (4,), (2, 4), (4, 2))
    }
    plans = [list(islice(faults(3, run, list(KINDS), quick=False), 200)) for run in runs]
    assert plans[0] == list(islice(faults(3, runs[0], list(KINDS), quick=False), 200))
    assert plans[0] != plans[1]
    drawn = [{fault.kind for fault in plan} for plan in plans]
    assert set().union(*drawn) == set(KINDS) >= ENDERS
    assert all(("resize" in kinds) <= (len(run.worlds) > 1) for kinds, run in zip(drawn, runs, strict=True))
    assert all(
        ("throttle" in kinds) <= (run.launcher == "lab") for kinds, run in zip(drawn, runs, strict=True)
    )


def test_a_quick_run_has_each_kind_once() -> None:
    runs = list(settings(3, [2, 4], LAUNCHERS, quick=True))
    assert [run.launcher for run in runs] == ["torchrun", "lab"]
    kinds = [fault.kind for run in runs for fault in faults(3, run, list(KINDS), quick=True)]
    assert sorted(kinds) == sorted(KINDS.keys() - {"freeze"})
