"""How passes follow each other, and what a state refuses."""

from typing import Any

import numpy as np
import pytest

from overlapkit.input.order import Order
from overlapkit.input.progress import Progress


def progress(size: int = 100, world: int = 1, *, seed: int = 0, drop_last: bool = True) -> Progress:
    return Progress(Order(size, 0, world, seed, True, drop_last))


def test_each_pass_is_a_new_epoch_however_the_last_one_ended() -> None:
    here = progress()
    assert (here.begin(), here.epoch) == (100, 0)
    here.take(100)
    assert (here.begin(), here.epoch) == (100, 1)
    here.take(3)
    assert (here.begin(), here.epoch, here.position) == (100, 2, 0)


def test_a_state_begins_one_pass_at_any_world() -> None:
    here, there = progress(world=4), progress(world=3)
    here.set_epoch(7)
    here.begin()
    here.take(5)
    there.load_state_dict(here.state_dict())
    assert (there.epoch, there.position) == (7, 20)
    assert there.begin() == 26
    there.take(1)
    assert there.position == 23
    assert (there.begin(), there.epoch) == (33, 8)


def test_setting_the_epoch_of_a_state_keeps_its_position_and_another_does_not() -> None:
    here = progress()
    state = {**here.state_dict(), "epoch": 2, "position": 40}
    here.load_state_dict(state)
    here.set_epoch(2)
    assert here.begin() == 60
    here.load_state_dict(state)
    here.set_epoch(3)
    assert here.begin() == 100
    here.set_epoch(3)  # a pass has begun: this asks for the epoch again
    assert (here.begin(), here.epoch) == (100, 3)


@pytest.mark.parametrize("position", [99, 100])
def test_a_state_at_the_end_starts_the_next_epoch(position: int) -> None:
    here = progress(world=2)
    here.load_state_dict({**here.state_dict(), "epoch": 4, "position": position})
    assert (here.begin(), here.epoch) == (50, 5)
    here.load_state_dict({**here.state_dict(), "epoch": 4, "position": position})
    here.set_epoch(4)
    assert (here.begin(), here.epoch) == (50, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "state has seed=1, this source has 0"),
        ({"size": 101}, "state has size=101, this source has 100"),
        ({"shuffle": False}, "state has shuffle=False"),
        ({"format": 2}, "state has format=2"),
        ({"position": 101}, "position 101: it is damaged"),
        ({"position": -1}, "position -1: it is damaged"),
        ({"epoch": -1}, "epoch -1"),
        *(
            ({name: value}, f"{name} {value!r}.*: it is damaged")
            for name in ("epoch", "position")
            for value in (True, 3.0, "3", None)
        ),
    ],
)
def test_a_state_of_another_order_is_refused(changed: dict[str, Any], message: str) -> None:
    here = progress()
    with pytest.raises(ValueError, match=message):
        here.load_state_dict({**here.state_dict(), **changed})
    assert here.begin() == 100


def test_a_state_that_lacks_something_is_refused() -> None:
    here = progress()
    with pytest.raises(ValueError, match="state lacks epoch, position"):
        here.load_state_dict(
            {name: here.state_dict()[name] for name in ("format", "size", "seed", "shuffle")}
        )
    with pytest.raises(TypeError, match="state is a list"):
        here.load_state_dict([])  # type: ignore[arg-type]


def test_numpy_s_integers_are_integers() -> None:
    here = progress()
    here.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert type(here.state_dict()["epoch"]) is int
    here.load_state_dict({**here.state_dict(), "position": np.int32(40)})
    assert type(here.state_dict()["position"]) is int
    assert (here.begin(), here.epoch) == (60, 3)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, "1", np.True_, np.float64(1)])
def test_an_epoch_that_is_none_is_refused(epoch: object) -> None:
    with pytest.raises(ValueError, match="epoch="):
        progress().set_epoch(epoch)  # type: ignore[arg-type]


def test_a_rest_that_is_not_worth_a_pass_is_the_epoch_s_end() -> None:
    here = Progress(Order(100, 0, 2, 0, True, True), least=5)
    for position, begun in ((90, (5, 2)), (91, (50, 3))):
        here.load_state_dict({**here.state_dict(), "epoch": 2, "position": position})
        assert (here.begin(), here.epoch) == begun
    here.load_state_dict({**here.state_dict(), "epoch": 2, "position": 91})
    here.set_epoch(2)
    assert (here.begin(), here.epoch, here.position) == (50, 2, 0)


def test_what_else_a_position_depends_on_stands_in_the_state() -> None:
    here = Progress(Order(100, 0, 1, 0, True, True), identity={"window": 8})
    state = here.state_dict()
    assert state["window"] == 8
    here.load_state_dict(state)
    with pytest.raises(ValueError, match="state has window=9, this source has 8"):
        here.load_state_dict({**state, "window": 9})
    with pytest.raises(ValueError, match="state lacks window"):
        here.load_state_dict(progress().state_dict())


def test_a_pass_that_is_still_taking_does_not_move_the_next_one() -> None:
    here = progress()
    here.begin()
    here.set_epoch(4)
    here.take(30)  # a reader that is in the middle of a batch
    here.finish()
    assert (here.state_dict()["epoch"], here.state_dict()["position"]) == (4, 0)
    assert (here.begin(), here.epoch, here.position) == (100, 4, 0)
