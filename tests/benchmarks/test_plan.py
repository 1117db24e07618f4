"""The benchmark of plans: the published runs, and its figures from made-up answers of the ranks."""

import json
from typing import Any

import pytest

import plan as bench
from llama import COMPILED, EAGER, FLOAT8, H100, PARAMETERS, llama
from overlapkit.parallel import ShardPlan
from overlapkit.plan import LinkTable, simulate
from overlapkit.plan.links import OPS
from tests.plan.models import made


def test_the_published_loss_from_8_to_128_gpus_is_predicted_within_a_point() -> None:
    figures = {figure.name: figure for figure in bench.published()}
    for pair in (EAGER, FLOAT8):
        assert figures[f"{pair.name}: error of it"].limit == 1.0
        assert figures[f"{pair.name}: error of it"].value <= 1.0
    spread = bench.fit_spread(COMPILED)
    assert bench.predict(COMPILED, spread) == pytest.approx(COMPILED.many, rel=1e-3)
    assert bench.predict(EAGER, 0.0) > EAGER.eight, (
        "without slow ranks nothing is lost: the optimizer is shared"
    )


def test_the_model_is_llamas() -> None:
    assert PARAMETERS == 8_030_261_248  # of the published weights
    assert llama(2.0).parameters == PARAMETERS
    assert llama(2.0).forward_s + llama(2.0).backward_s == pytest.approx(2.0)
    report = simulate(llama(2.5), H100, 16384, param_bytes=2, spread=0.02)
    assert report.world == 16384
    assert report.parts["communication"].mean_ms > 0


class FakeLab:
    """Ranks that took as long as they are told."""

    def __init__(self, took: dict[str, float]) -> None:
        self.mbit = 1000.0
        self.took = took
        self.tasks: list[dict[str, Any]] = []

    def run(self, script: object, args: list[str]) -> list[str]:
        self.tasks.append(json.loads(args[0]))
        names = [one["name"] for one in self.tasks[-1]["variants"]]
        answers = [
            {name: {"step_s": self.took[name] - rank * 0.001, "exposed": 0.25} for name in names}
            for rank in range(2)
        ]
        return [f"noise\n{json.dumps(answer)}" for answer in answers]


def test_measured_steps_stand_beside_simulated_ones_and_the_chosen_plan_beside_others() -> None:
    rows = {op: ((1000, 1e-3), (10**8, 1.0)) for op in OPS}  # noqa: C420 # each of its own
    profile, link = made(), LinkTable(2, rows)
    shape = bench.Shape("small", 4, 1 << 20, 0.01)
    variants = [*bench.VARIANTS, *bench.plans(shape, profile, link)]
    assert len(variants) == 3 + 1 + 12
    simulated = simulate(profile, link, 2).period_ms / 1e3
    took = {one.name: 2.0 for one in variants} | {"shard": simulated * 1.25, "chosen": 1.9}
    lab = FakeLab(took)
    found = {f.name: f for f in bench.compare(lab, shape, profile, link, variants, rounds=1)}  # type: ignore[arg-type]
    where = "small, 1000 Mbit/s"
    assert found[f"{where}, shard: step, off by"].value == pytest.approx(20.0)
    assert found[f"{where}, shard: step, off by"].limit == 10.0
    exposed = 100 * abs(simulate(profile, link, 2).exposed_share - 0.25)
    assert found[f"{where}, shard: exposed share, off by"].value == pytest.approx(exposed)
    assert found[f"{where}: chosen plan"].ratio == pytest.approx(1.9 / (simulated * 1.25))
    assert found[f"{where}: chosen plan beside the grid's best"].ratio == pytest.approx(0.95)
    plans = [one["plan"] for one in lab.tasks[0]["variants"]]
    assert plans[1] is None
    assert ShardPlan.from_json(plans[2]).forward_prefetch == 0
