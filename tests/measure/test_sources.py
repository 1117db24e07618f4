import gc

import pytest
import torch

from overlapkit.measure.sources import Coverage, Tap, publishes
from overlapkit.span import Span
from tests.fake_clock import FakeComponent

A, B = Span("input", "a", 0, 1), Span("input", "b", 1, 2)


def coverage(world=1, **parts):
    return Coverage(
        dict.fromkeys(("model", "optimizer", "loader", "checkpointer")) | parts,
        world,
    )


def test_two_meters_on_one_component_both_see_all():
    component = FakeComponent()
    first, second = Tap(component, "loader"), Tap(component, "loader")
    component.publish(A)
    assert first.take() == [A]
    component.publish(B)
    assert second.take() == [A, B]
    assert first.take() == [B]
    assert first.take() == second.take() == []


def test_what_was_before_a_tap_is_not_its_own_but_still_the_others():
    component = FakeComponent()
    first = Tap(component, "loader")
    component.publish(A)
    second = Tap(component, "loader")
    assert second.take() == []
    assert first.take() == [A]


def test_a_tap_that_is_closed_or_dropped_keeps_nothing():
    component = FakeComponent()
    first, second, third = (Tap(component, "loader") for _ in range(3))
    first.close()
    del second
    gc.collect()
    component.publish(A)
    assert third.take() == [A]
    assert list(first._queue) == []


@pytest.mark.parametrize("junk", [None, (), [1], {"a": 1}])
def test_something_that_is_no_list_of_spans_is_refused(junk):
    component = FakeComponent()
    component.timings = lambda: junk
    with pytest.raises(TypeError, match=r"loader: FakeComponent\.timings\(\) must return a list"):
        Tap(component, "loader")


def test_a_component_without_a_hash_can_be_tapped():
    class Unhashable(FakeComponent):
        __hash__ = None

    component = Unhashable()
    tap = Tap(component, "loader")
    component.publish(A)
    assert tap.take() == [A]


def test_the_protocol_is_a_callable_that_is_no_module():
    assert publishes(FakeComponent())
    assert not publishes([1, 2])
    model = torch.nn.Module()
    model.timings = torch.nn.Linear(2, 2)
    assert not publishes(model)


def test_reasons_where_nothing_was_given():
    nothing = coverage()
    assert "no loader was given" in nothing.missing("input")
    assert nothing.missing("input", fed=True) is None
    assert "CPU" in nothing.missing("transfer")
    assert nothing.missing("communication") == "single process"
    assert "no checkpointer" in nothing.missing("checkpoint")
    assert "no model" in nothing.missing("compute")
    assert "no optimizer" in nothing.missing("optimizer")


def test_components_that_publish_are_covered():
    full = coverage(loader=FakeComponent(), checkpointer=FakeComponent(), optimizer=object())
    for lane in ("input", "checkpoint", "optimizer"):
        assert full.missing(lane) is None
    full.note([Span("transfer", "wait", 0, 1, exposed=True)])
    assert full.missing("transfer") is None


def test_foreign_parts():
    plain = coverage(world=2, loader=[1], model=torch.nn.Linear(2, 2))
    assert "list publishes no timings" in plain.missing("input")
    assert "foreign wrapper: Linear" in plain.missing("communication")
    assert "no model" in coverage(world=2).missing("communication")


def test_on_a_device_the_total_is_not_the_exposed_part():
    model = torch.nn.Linear(2, 2)
    model.__dict__["timings"] = FakeComponent().timings
    wrapped = coverage(world=2, model=model)
    wrapped.device = torch.device("cuda", 0)
    assert wrapped.missing("communication") is None
    wrapped.note([Span("communication", "all_gather", 0, 1)])
    assert "only the work itself" in wrapped.missing("communication")
    wrapped.note([Span("communication", "tail", 0, 1, exposed=True)])
    assert wrapped.missing("communication") is None
