"""The harness: order of calls, statistics, goals, exit codes and the report."""

import json
import random
import statistics

import pytest
import torch

import harness
import machine
from harness import Figure, Measurement, alternate, finish, parser, time_figure, timer_for


def _counting(log: list[str], name: str):
    return lambda: log.append(name)


def test_variants_alternate_and_each_takes_every_place():
    log: list[str] = []
    took = alternate({name: _counting(log, name) for name in "abc"}, rounds=4, warmup=2)
    rounds = ["".join(log[at : at + 3]) for at in range(0, len(log), 3)]
    assert rounds[2:] == ["abc", "bca", "cab", "abc"]
    assert len(rounds) == 6
    assert list(took) == ["a", "b", "c"]
    assert all(len(measured.samples) == 4 for measured in took.values())


def test_warmup_is_thrown_away_and_samples_stay_with_their_variant():
    clock = {"a": iter([99.0, 1.0, 2.0]), "b": iter([99.0, 3.0, 4.0])}
    took = alternate(
        {name: lambda name=name: next(clock[name]) for name in clock},
        rounds=2,
        warmup=1,
        timer=harness.returned_seconds,
    )
    assert took == {"a": Measurement("a", (1.0, 2.0)), "b": Measurement("b", (3.0, 4.0))}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 100])
def test_median_and_quartiles_against_a_sorted_list(count):
    samples = [random.Random(count).expovariate(1.0) for _ in range(count)]
    measured = Measurement("x", tuple(samples))
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (count - 1)
        below = int(place)
        above = min(below + 1, count - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    assert measured.median == statistics.median(samples)
    assert measured.quartiles == pytest.approx((at(0.25), at(0.75)))


def test_an_error_in_a_variant_names_it():
    def broken():
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside") as caught:
        alternate({"fine": lambda: None, "broken": broken}, rounds=1, warmup=0)
    assert "'broken', round 0" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("variants", "options"),
    [({}, {"rounds": 1}), ({"a": print}, {"rounds": 0}), ({"a": print}, {"rounds": 1, "warmup": -1})],
)
def test_nothing_to_measure_is_an_error(variants, options):
    with pytest.raises(ValueError, match=r"variants=|rounds="):
        alternate(variants, **options)


def test_a_variant_that_should_time_itself_and_does_not():
    with pytest.raises(TypeError, match="returned None"):
        alternate({"a": lambda: None}, rounds=1, timer=harness.returned_seconds)


@pytest.mark.parametrize(
    ("better", "value", "limit", "met"),
    [
        ("lower", 5.0, 5.0, True),
        ("lower", 5.1, 5.0, False),
        ("higher", 5.0, 5.0, True),
        ("higher", 4.9, 5.0, False),
        ("lower", None, 5.0, False),
        ("lower", 5.0, None, None),
        (None, 5.0, None, None),
    ],
)
def test_a_goal_on_the_value(better, value, limit, met):
    assert Figure("f", value, "ms", better=better, limit=limit).met is met


@pytest.mark.parametrize(
    ("better", "value", "peer_value", "ratio", "met"),
    [
        ("lower", 1.0, 2.0, 0.5, True),
        ("lower", 1.2, 2.0, 0.6, False),
        ("higher", 1.0, 2.0, 0.5, True),
        ("higher", 0.8, 2.0, 0.4, False),
        ("lower", 1.0, None, None, False),
        ("lower", None, 2.0, None, False),
        ("lower", 0.0, 0.0, None, True),
        ("lower", 0.1, 0.0, None, False),
    ],
)
def test_a_goal_on_the_ratio(better, value, peer_value, ratio, met):
    figure = Figure("f", value, "ms", better=better, peer="p", peer_value=peer_value, ratio_limit=0.5)
    assert figure.ratio == ratio
    assert figure.met is met


def test_both_goals_must_be_met():
    def met(value: float) -> bool | None:
        return Figure("f", value, "", "lower", peer="p", peer_value=2.0, limit=5.0, ratio_limit=2.0).met

    assert [met(3.0), met(4.5), met(6.0)] == [True, False, False]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"limit": 1.0}, "direction"),
        ({"better": "more"}, "better='more'"),
        ({"peer_value": 1.0}, "peer="),
        ({"better": "lower", "ratio_limit": 1.0}, "peer="),
        ({"value": float("nan")}, "None for what was not measured"),
        ({"peer": "p", "peer_value": float("inf")}, "None for what was not measured"),
    ],
)
def test_a_figure_that_makes_no_sense_is_an_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        Figure(**({"name": "f", "value": 1.0, "unit": "ms"} | wrong))


def test_time_figure_scales_everything():
    figure = time_figure(
        "t", Measurement("ours", (0.001, 0.002, 0.003)), Measurement("peer", (0.004,)), ratio_limit=0.5
    )
    assert (figure.value, figure.unit, figure.peer, figure.peer_value) == (2.0, "ms", "peer", 4.0)
    assert figure.spread == pytest.approx((1.5, 2.5))
    assert figure.met is True
    assert time_figure("t", Measurement("ours", (0.002,)), unit="us").value == 2000.0


@pytest.mark.parametrize(
    ("limits", "code"), [((None,), 0), ((2.0, None), 0), ((2.0, 0.5), 3), ((0.5, 2.0), 3)]
)
def test_exit_codes(limits, code, capsys):
    figures = [Figure(f"f{at}", 1.0, "ms", "lower", limit=limit) for at, limit in enumerate(limits)]
    assert finish(figures, parser("Does it?").parse_args([])) == code
    shown = capsys.readouterr().out
    assert "Does it?" in shown
    assert ("MISSED" in shown) == (code == 3)


def test_the_report_holds_what_the_design_says(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    monkeypatch.setattr(machine, "commit", lambda: "as it began")
    args = parser("Does it?").parse_args(["--quick", "--json", str(path)])
    monkeypatch.setattr(machine, "commit", lambda: "dirty from what it drew")
    figures = [
        Figure("a", 1.0, "ms", "lower", peer="p", peer_value=2.0, ratio_limit=0.9, spread=(0.9, 1.1)),
        Figure("b", None, "GB/s"),
    ]
    assert finish(figures, args) == 0
    report = json.loads(path.read_text())
    assert report["question"] == "Does it?"
    assert report["quick"] is True
    assert "python" in report["command"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["hardware"]["cores"] >= 1
    assert report["hardware"]["memory_gib"] > 0
    assert report["commit"] == "as it began"
    first, second = report["figures"]
    assert {"name", "value", "unit", "peer", "ratio", "goal", "met"} <= first.keys() == second.keys()
    assert (first["ratio"], first["goal"], first["met"]) == (0.5, "<= 0.9 x p", True)
    assert (second["value"], second["ratio"], second["goal"], second["met"]) == (None, None, None, None)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("figures", [[], [Figure("a", 1.0, "ms"), Figure("a", 2.0, "ms")]])
def test_a_report_of_nothing_or_of_two_alike_is_an_error(figures):
    with pytest.raises(ValueError, match="name of its own"):
        finish(figures, parser("Does it?").parse_args([]))


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path, capsys):
    for bad in (tmp_path, tmp_path / "absent" / "report.json"):
        with pytest.raises(SystemExit) as caught:
            parser("Does it?").parse_args(["--json", str(bad)])
        assert caught.value.code == 2
        assert "folder that exists" in capsys.readouterr().err


def test_torch_threads_are_put_back():
    before = torch.get_num_threads()
    with harness.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_cpu_timer_is_the_wall_clock():
    assert timer_for(torch.device("cpu")) is harness.wall_seconds


@pytest.mark.gpu
def test_the_gpu_timer_waits_for_the_kernels():
    timer = timer_for(torch.device("cuda"))
    assert timer(lambda: torch.cuda._sleep(100_000_000)) > 0.02  # cycles; no GPU runs at 5 GHz
