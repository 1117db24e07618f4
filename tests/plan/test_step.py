"""A step played through, against timelines that were worked out by hand."""

import pytest

from overlapkit.plan.step import Rules, Step, Work, rules_of
from overlapkit.plan.wires import Wires


def block(name: str, forward: float = 4.0, gather: float = 3.0, reduce: float = 5.0, **more: object) -> Work:
    return Work(name, forward, 2 * forward, 100, gather, gather, 100, reduce, **more)  # type: ignore[arg-type]


ROOT = Work("(root)", 0.0, 0.0)


def timeline(work: list[Work], rules: Rules) -> list[tuple[str, float, float]]:
    played = Step(work, rules).play()
    ends = [phase.end for phase in played.phases]
    assert [phase.start for phase in played.phases] == [0.0, *ends[:-1]], "gapless"
    assert played.end == ends[-1]
    return [(f"{phase.kind} {phase.name}", phase.start, phase.end) for phase in played.phases]


def test_without_prefetch_every_gather_is_waited_for() -> None:
    assert timeline([block("a"), block("b"), ROOT], Rules(0, 0, blocking=True)) == [
        ("communication wait all_gather a", 0, 3),
        ("forward a", 3, 7),
        ("communication wait all_gather b", 7, 10),
        ("forward b", 10, 14),
        ("communication wait all_gather b", 14, 17),
        ("backward b", 17, 25),
        ("communication reduce_scatter b", 25, 30),
        ("communication wait all_gather a", 30, 33),
        ("backward a", 33, 41),
        ("communication reduce_scatter a", 41, 46),
    ]


def test_with_prefetch_the_first_gather_the_turn_and_the_tail_are_left() -> None:
    work = [block("a"), block("b", regathers=False), ROOT]
    assert timeline(work, Rules(1, 1)) == [
        ("communication wait all_gather a", 0, 3),
        ("forward a", 3, 7),
        ("forward b", 7, 11),
        ("backward b", 11, 19),  # a is gathered meanwhile
        ("backward a", 19, 27),  # and b reduced
        ("communication reduction tail", 27, 32),
    ]


def test_one_communicator_makes_the_gather_wait_for_the_reduction() -> None:
    work = [block("a", gather=6.0), block("b"), block("c", regathers=False), ROOT]
    one = timeline(work, Rules(1, 0))
    assert one[:4] == [  # b is gathered 6-9, c 10-13
        ("communication wait all_gather a", 0, 6),
        ("forward a", 6, 10),
        ("forward b", 10, 14),
        ("forward c", 14, 18),
    ]
    assert one[4:] == [
        ("backward c", 18, 26),
        ("communication wait all_gather b", 26, 34),  # behind c's reduction, 26-31
        ("backward b", 34, 42),
        ("communication wait all_gather a", 42, 53),  # behind b's, 42-47
        ("backward a", 53, 61),
        ("communication reduction tail", 61, 66),
    ]
    own = timeline(work, Rules(1, 0, separate=True))
    assert own[4:] == [
        ("backward c", 18, 26),
        ("communication wait all_gather b", 26, 32),  # 3 s of work at half speed, beside c's reduction
        ("backward b", 32, 40),  # c's reduction: 2 s left at 32, over at 34
        ("communication wait all_gather a", 40, 51),  # 5 of 6 s by 50, when b's reduction is over
        ("backward a", 51, 59),
        ("communication reduction tail", 59, 64),
    ]


def test_a_limit_of_reductions_in_flight_holds_backward_up() -> None:
    work = [block("a", 1.0, reduce=9.0), block("b", 1.0, reduce=9.0), block("c", 1.0, regathers=False), ROOT]
    free = Step(work, Rules(2, 2, separate=True)).play()
    held = Step(work, Rules(2, 2, separate=True, buffers=1)).play()
    assert "wait reduce_scatter c" in [phase.name for phase in held.phases]
    assert not any("wait reduce" in phase.name for phase in free.phases)
    assert held.end == free.end  # the link is the limit either way


def test_a_root_with_parameters_is_gathered_first_and_reduced_last() -> None:
    root = Work("(root)", 1.0, 2.0, 10, 2.0, 2.0, 10, 1.0, regathers=False)
    assert timeline([block("a", regathers=False), root], Rules(1, 1)) == [
        ("communication wait all_gather (root)", 0, 2),
        ("communication wait all_gather a", 2, 5),
        ("forward a", 5, 9),
        ("forward (root)", 9, 10),
        ("backward (root)", 10, 12),
        ("backward a", 12, 20),
        ("communication reduction tail", 20, 26),
    ]


def test_two_that_share_a_link_take_what_both_take() -> None:
    wires = Wires()
    first = wires.launch("gather", "g", 1, 4.0, 0.0)
    second = wires.launch("reduce", "r", 1, 2.0, 1.0)
    behind = wires.launch("gather", "h", 1, 1.0, 2.0)
    assert wires.finish(second) == pytest.approx(5.0)  # alone from 1 on it had taken 2 s: 4 at half speed
    assert wires.finish(first) == pytest.approx(6.0)
    assert wires.finish(behind) == pytest.approx(7.0)
    assert (behind.start, behind.launched) == (pytest.approx(6.0), 2.0)
    assert wires.drain(9.0) == 9.0
    nothing = wires.launch("gather", "n", 0, 0.0, 9.0)
    assert wires.finish(nothing) == 9.0


def test_alone_on_wires_of_their_own_they_do_not_slow_each_other() -> None:
    wires = Wires(shared=False)
    first = wires.launch("gather", "g", 1, 4.0, 0.0)
    second = wires.launch("reduce", "r", 1, 2.0, 1.0)
    assert (wires.finish(second), wires.finish(first)) == (3.0, 4.0)


def test_the_root_gathers_ahead_for_backward_too() -> None:
    root = Work("(root)", 0.0, 5.0)
    assert timeline([block("a"), block("b"), root], Rules(1, 1))[-4:] == [
        ("backward (root)", 11, 16),  # b is gathered again 11-14
        ("backward b", 16, 24),
        ("backward a", 24, 32),
        ("communication reduction tail", 32, 37),
    ]


def test_copies_into_and_out_of_buffers_are_made_by_the_compute_lane() -> None:
    work = [block("a", regathers=False, pack_s=0.5, unpack_s=1.0, flatten_s=2.0), ROOT]
    assert timeline(work, Rules(1, 1)) == [
        ("forward a", 0, 0.5),
        ("communication wait all_gather a", 0.5, 3.5),
        ("forward a", 3.5, 4.5),
        ("forward a", 4.5, 8.5),
        ("backward a", 8.5, 16.5),
        ("backward a", 16.5, 18.5),
        ("communication reduction tail", 18.5, 23.5),
    ]


def test_copies_of_a_shard_reduce_behind_its_reduction_beside_other_gathers() -> None:
    first = block("a", gather=1.0, reduce=1.0, copies_bytes=7, copies_s=4.0)
    last = block("b", gather=1.0, reduce=1.0, copies_bytes=7, copies_s=4.0, regathers=False)
    played = Step([first, last, ROOT], Rules(1, 1)).play()
    reduced = [(one.name, one.nbytes, one.start, one.end) for one in played.transfers[-4:]]
    assert reduced == [
        ("reduce_scatter b", 100, 17, 18),
        ("all_reduce b", 7, 18, 22),
        ("reduce_scatter a", 100, 25, 26),
        ("all_reduce a", 7, 26, 30),
    ]
    held = Step([first, last, ROOT], Rules(1, 1, blocking=True)).play()
    assert [phase.name for phase in held.phases[-2:]] == ["reduce_scatter a", "all_reduce a"]
    assert held.end == played.end + 5


def test_on_both_devices_gathers_and_reductions_queue_on_one_communicator() -> None:
    assert rules_of("cpu") == Rules(separate=False, buffers=2)
    assert rules_of("cuda:0") == Rules(separate=False, buffers=1)
