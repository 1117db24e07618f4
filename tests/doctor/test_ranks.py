"""Several ranks: one report, the slow link and the slow mount by name, and nobody who waits for ever."""

import os
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist

from overlapkit.doctor import examine
from overlapkit.doctor.examine import Instruments
from overlapkit.doctor.job import Job
from overlapkit.doctor.link.local import measure_locally
from overlapkit.doctor.link.measures import Plan, Wire
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Place, Subject
from tests.doctor.looking import trials, weak
from tests.doctor.trees import Tree, torch_on
from tests.ranks import run_ranks

SMALL = Plan((1 << 10, 1 << 14), 1 << 12, each_s=0.001)
KEPT = {("loop", "cores"), ("loop", "threads"), ("storage", "checkpoints"), ("job", "ranks")}


class Told(Wire):
    """The real wire, whose times are told: so long, but for one pair, one rank's work, or one size."""

    slow_pair: tuple[int, int] = (-1, -1)
    slow_rank = -1

    def collective(self, kind, nbytes):
        super().collective(kind, nbytes)
        return 1e-3 + nbytes / 1e9

    def exchange(self, peer, nbytes):
        super().exchange(peer, nbytes)
        return 0.05 if {peer, dist.get_rank()} == set(self.slow_pair) else 0.01

    def work(self):
        super().work()
        return 0.3 if dist.get_rank() == self.slow_rank else 0.1


def instruments(root, rank, world, write=2e9, host="node", wire=Told, **environ):
    tree = Tree(root / str(rank)).linux(cpus=world)
    tree.environ |= {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], **environ}
    if os.environ.get("MASTER_PORT"):
        tree.environ |= {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    subject = Subject(tree.machine(), torch_on(0), Place(rank, world, rank, world), "no driver")
    return Instruments(
        subject=lambda: subject,
        host=lambda: host,
        trials=trials(write=write),
        wire=wire,
        plan=lambda on_gpus: SMALL,
        checks=lambda checks: tuple(one for one in checks if (one.layer.name, one.name) in KEPT),
    )


def look(root, rank, world, *, link=False, timeout=20.0, **more):
    tools = instruments(root, rank, world, **more)
    found = examine(link=link, timeout=timeout, seconds=0, checkpoints=root, instruments=tools)
    return found.to_dict(), weak(found.lines), found.alone


def test_four_ranks_one_report_with_the_slow_pair_and_the_late_rank(tmp_path):
    def job(rank):
        Told.slow_pair, Told.slow_rank = (1, 3), 2
        return look(tmp_path, rank, 4, link=True)

    (report, found, _), *others = run_ranks(4, job)
    topology = [line for line in report["lines"] if line["name"] == "topology"]
    assert [line["saw"] for line in topology] == ["ranks 1 and 3 (node): 5.0 times the usual pair"]
    assert [one for one in found if one[1] == "late rank"] == [
        ("job", "late rank", "rank 2: 3.0 times the others' time for the same compute")
    ]
    lines = {line["name"]: line for line in report["lines"]}
    assert lines["ranks"]["saw"] == "4 ranks on 1 machine(s): node"
    assert lines["agreement"]["state"] == "ok"
    assert lines["cores"]["ranks"] == (0, 1, 2, 3)
    link = report["figures"]["link"]
    assert link["collectives"]["all_reduce"] == {
        "1024": pytest.approx(1e-3, rel=0.01),
        "16384": pytest.approx(1e-3, rel=0.05),
    }
    assert len(link["pairs"]) == 6
    assert link["rounds"] == link["all_rounds"] == 3
    assert [other[0]["rank"] for other in others] == [1, 2, 3]
    assert [other[2] for other in others] == ["", "", ""]
    assert not [line for other in others for line in other[0]["lines"] if line["name"] == "topology"]


def test_the_real_wire_between_two_ranks(tmp_path):
    def job(rank):
        dist.destroy_process_group()  # as under torchrun: the doctor makes its own, and ends it
        served = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        found = [look(tmp_path, rank, 2, link=True, wire=Wire, **served) for _ in range(2)]
        assert not dist.is_initialized()
        return found[1][0]["figures"]["link"]

    first, second = run_ranks(2, job)
    assert first == second
    assert set(first["collectives"]) == {"all_reduce", "all_gather"}
    times = [seconds for kind in first["collectives"].values() for seconds in kind.values()]
    assert all(seconds > 0 for seconds in [*times, *first["pairs"].values(), *first["work"]])
    assert list(first["pairs"]) == ["0-1"]


def test_one_slow_mount_is_named_with_its_ranks(tmp_path):
    def job(rank):
        slow = rank == 2
        return look(tmp_path, rank, 3, write=300e6 if slow else 2e9, host=f"node-{'abc'[rank]}")

    (report, found, _), *_ = run_ranks(3, job)
    assert found == [
        ("storage", "checkpoints of all ranks", "rank 2 on node-c writes 300 MB/s, the others 2,000 MB/s")
    ]
    assert [one["checkpoints"] for one in report["figures"]["storage"]] == [2e9, 2e9, 300e6]


def test_storage_is_measured_for_real_and_leaves_nothing(tmp_path):
    from overlapkit.doctor.layers.storage import Trials

    def job(rank):
        tools = instruments(tmp_path, rank, 2)
        tools = Instruments(**{**vars(tools), "trials": Trials()})
        folder = tmp_path / "runs"
        return examine(checkpoints=folder, seconds=0, timeout=20, instruments=tools).figures

    (tmp_path / "runs").mkdir()
    first, _ = run_ranks(2, job)
    assert len(first["storage"]) == 2
    assert all(one["checkpoints"] > 0 for one in first["storage"])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_rank_with_another_version_or_setting_is_named(tmp_path):
    def job(rank):
        return look(tmp_path, rank, 3, **({"NCCL_DEBUG": "WARN"} if rank == 1 else {}))[1]

    found, *_ = run_ranks(3, job)
    assert found == [("job", "agreement", "rank 1 has NCCL_DEBUG WARN, the others unset")]


def test_a_rank_that_never_comes_is_named_and_nobody_waits_for_links(tmp_path):
    def job(rank):
        if rank == 1:
            time.sleep(1.5)
            return None
        return look(tmp_path, rank, 3, link=True, timeout=1.0)

    (_, found, alone), _, (_, other, other_alone) = run_ranks(3, job)
    assert found[0][:2] == ("job", "ranks")
    assert found[0][2] == "rank 1 of 3 is absent: nothing from it within 1 s; there are node"
    assert found[1] == ("job", "links", "not measured: 2 of 3 ranks are there")
    assert (alone, other_alone) == ("", "")
    assert [one[1] for one in other] == ["links"]


def test_rank_0_that_never_comes_is_named(tmp_path):
    def job(rank):
        if rank == 0:
            time.sleep(1.5)
            return None
        return look(tmp_path, rank, 2, timeout=0.5)

    _, (_, found, alone) = run_ranks(2, job)
    assert alone == "rank 0 is absent: nothing within 1 s"
    assert found == [("job", "ranks", alone)]


class Dies(Told):
    def exchange(self, peer, nbytes):
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().exchange(peer, nbytes)


def test_a_rank_that_dies_while_links_are_measured_is_named(tmp_path):
    def job(rank):
        dist.destroy_process_group()  # the doctor's own has the doctor's timeout
        served = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        return look(tmp_path, rank, 3, link=True, timeout=3.0, wire=Dies, **served)[1]

    first, second, died = run_ranks(3, job, may_die=(2,))
    assert died == -signal.SIGKILL
    for found in (first, second):
        (line,) = [one for one in found if one[1] == "links"]
        assert line[2].startswith("not measured: ")
        assert "rank(s) 2 did not report within 3.0 s" in line[2]


def test_without_a_store_the_job_is_one_clear_line(tmp_path):
    place = Place(1, 2, 1, 2)
    with pytest.raises(Unreadable, match="MASTER_ADDR='' and MASTER_PORT|MASTER_ADDR='', MASTER_PORT"):
        Job.join(place, {}, 1.0)
    for port in ("0", "65536", "x"):
        with pytest.raises(Unreadable, match=f"MASTER_PORT='{port}' name no store"):
            Job.join(place, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, 1.0)
    with pytest.raises(Unreadable, match=r"rank 0's store at 127\.0\.0\.1:9 does not answer"):
        Job.join(place, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, 0.2)
    tools = instruments(tmp_path, 1, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    found = examine(seconds=0, timeout=1, instruments=tools)
    assert found.alone.startswith("rank 0's store at 127.0.0.1:9 does not answer")


def test_processes_of_its_own_measure():
    steps = []
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    found = measure_locally(2, 60.0, environ, lambda *step: steps.append(step))
    assert list(found["pairs"]) == ["0-1"]
    assert len(found["work"]) == 2
    assert [step[0] for step in steps] == list(range(len(steps)))
    assert {step[1] for step in steps} == {len(steps)}


FAILURES = {
    "dies": ("print('noise')\nraise SystemExit(9)", 20.0, r"rank [01] ended with exit code 9,"),
    "fails": ('print(\'{"error": "it broke"}\', flush=True)\ntime.sleep(60)', 20.0, r"rank [01]: it broke"),
    "hangs": ("time.sleep(60)", 0.3, r"nothing within 0.3 s from the ranks that are measuring: 0, 1"),
}


@pytest.mark.parametrize(("program", "timeout", "why"), FAILURES.values(), ids=FAILURES)
def test_processes_of_its_own_that_do_not_measure_are_named_and_ended(tmp_path, program, timeout, why):
    (tmp_path / "a_rank.py").write_text(f"import time\n{program}")
    before = set(threading.enumerate())
    with pytest.raises(Unreadable, match=why):
        measure_locally(2, timeout, {**os.environ, "PYTHONPATH": str(tmp_path)}, program="a_rank")
    assert set(threading.enumerate()) == before
