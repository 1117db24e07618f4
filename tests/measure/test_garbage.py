import gc
import weakref

import pytest

import overlapkit as ok
from overlapkit.measure.garbage import FROZEN


@pytest.fixture(scope="module", autouse=True)
def thawed():
    """As in a script: the suite freezes what its tests have in common."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collector(thawed):
    """As every test of the suite expects it."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() < FROZEN
    yield
    assert (gc.isenabled(), gc.get_freeze_count() < FROZEN) == (enabled, frozen)


class Ring:
    def __init__(self):
        self.me = self


def dropped():
    return weakref.ref(Ring())


def test_it_collects_every_nth_step_and_at_no_other_time():
    collections = []
    watch = lambda phase, info: collections.append(phase)  # noqa: E731
    with ok.collect_garbage(every=3) as garbage:
        gc.callbacks.append(watch)
        try:
            alive = []
            for _ in range(7):
                rings = [dropped() for _ in range(2000)]  # of themselves, far above the threshold
                garbage.step()
                alive.append(rings[0]() is not None)
        finally:
            gc.callbacks.remove(watch)
        assert alive == [True, True, False, True, True, False, True]
    assert collections == ["start", "stop"] * 2


def test_what_was_alive_at_the_beginning_is_left_out_until_the_end():
    ring = Ring()
    seen = weakref.ref(ring)
    garbage = ok.collect_garbage(every=1)
    assert gc.get_freeze_count() > FROZEN
    del ring
    garbage.step()
    assert seen() is not None
    garbage.close()
    garbage.close()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_put_back_also_by_an_exception(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), ok.collect_garbage():
            1 / gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_somebody_elses_frozen_objects_stay_frozen():
    gc.freeze()
    try:
        with ok.collect_garbage():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_one_inside_another_leaves_the_outer_ones_work_to_it():
    with ok.collect_garbage(every=2) as outer:
        with ok.collect_garbage(every=1) as inner:
            inner.step()
        assert not gc.isenabled()
        seen = dropped()
        outer.step()
        assert seen() is not None
        outer.step()
        assert seen() is None


@pytest.mark.parametrize(
    ("every", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_mistakes_are_errors_at_once(every, error):
    with pytest.raises(error, match=f"every={every!r}: give an int of at least 1"):
        ok.collect_garbage(every=every)


def test_a_step_after_close_is_an_error():
    garbage = ok.collect_garbage()
    garbage.close()
    with pytest.raises(RuntimeError, match="after close"):
        garbage.step()


def test_what_python_itself_keeps_frozen_is_nobody_elses(monkeypatch: pytest.MonkeyPatch):
    """Python 3.12 moves its immortal objects to where frozen ones are."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    ring = Ring()
    seen = weakref.ref(ring)
    with ok.collect_garbage(every=1) as garbage:
        del ring
        garbage.step()
        assert seen() is not None, "it was not frozen"
