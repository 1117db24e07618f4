"""The finder sees each kind of point, and only those; what is left when one is taken out is right."""

import ast
from pathlib import Path

import pytest

from tests.mutation.checkout import PACKAGE
from tests.mutation.points import in_package, in_source, without
from tests.mutation.rules import OTHERS

SOURCE = """
import torch

class Ring:
    def order(self):
        self._quietly(self.order)  # handed over
        return Progress(self.settled, lane.order)

    def take(self, lane, stream):
        value = lane.submit(
            lambda: 1
        ).wait()
        lane.submit(lambda: "é").wait(3)
        while not event.query():
            pass
        if (ticket.done() and
                ticket.done()):
            self.buffer.give_back(ticket)
        with torch.cuda.stream(stream), open("x") as file:
            done = torch.cuda.Event()
            done.record(stream)
            job._event = done
            stream.wait_stream(torch.cuda.current_stream())
        part.record_stream(stream); torch.cuda.synchronize()
        self.desk.wait(1.0)
        return work.wait

def free():
    wait()
    buffer.give_back()
    ", ".join(order.done)
    record = lane.record
"""

FOUND = {
    ("Ring.order", "self.order", 1): "(lambda held: lambda *_, **__: (held, None)[1])(self)",
    ("Ring.take", "lane.submit(lambda: 1).wait()", 1): (
        'getattr(lane.submit(lambda: 1), "_value", lane.submit(lambda: 1))'
    ),
    ("Ring.take", "lane.submit(lambda: 'é').wait(3)", 1): "(lane.submit(lambda: 'é'))",
    ("Ring.take", "event.query()", 1): "True",
    ("Ring.take", "ticket.done()", 1): "True",
    ("Ring.take", "ticket.done()", 2): "True",
    ("Ring.take", "self.buffer.give_back(ticket)", 1): "self.buffer.give_back()",
    ("Ring.take", "torch.cuda.stream(stream)", 1): '__import__("contextlib").nullcontext()',
    ("Ring.take", "done.record(stream)", 1): "(done)",
    ("Ring.take", "job._event = done", 1): "pass",
    ("Ring.take", "stream.wait_stream(torch.cuda.current_stream())", 1): "(stream)",
    ("Ring.take", "part.record_stream(stream)", 1): "(part)",
    ("Ring.take", "torch.cuda.synchronize()", 1): "(torch.cuda)",
    ("Ring.take", "self.desk.wait(1.0)", 1): "(self.desk)",
    ("Ring.take", "work.wait", 1): "(lambda held: lambda *_, **__: (held, None)[1])(work)",
    ("free", "wait()", 1): "None",
    ("free", "buffer.give_back()", 1): "(buffer)",
}


def test_each_kind_is_found_and_nothing_else() -> None:
    found = {(one.where, one.text, one.number): one.instead for one in in_source(SOURCE, "made.py")}
    assert found == FOUND


def test_one_is_taken_out_at_a_time_and_all_else_stays() -> None:
    for point in in_source(SOURCE, "made.py"):
        left = without(SOURCE, point)
        ast.parse(left)
        begin, end = point.span
        data = SOURCE.encode()
        assert left.encode() == data[:begin] + point.instead.encode() + data[end:]
        taken = ast.parse(data[begin:end].decode())
        assert ast.unparse(taken) == point.text


def test_keys_stay_when_lines_move() -> None:
    moved = "# a comment\n\n\n" + SOURCE.replace("wait(3)", "wait(\n    3)")
    assert [one.key for one in in_source(moved, "made.py")] == [
        one.key for one in in_source(SOURCE, "made.py")
    ]


def test_what_is_left_out_is_so_for_its_receiver_in_its_file_alone() -> None:
    source = "self.stop.wait(1)\nself.ticket.wait(1)\nself._quorum.settle(1)\n"
    for file, wanted in (("measure/across/watch.py", [True, False, True]), ("lane.py", [False, False, True])):
        assert [one.left_out is not None for one in in_source(source, file)] == wanted


@pytest.fixture(scope="module")
def points() -> list:
    return in_package(PACKAGE)


def test_every_point_of_the_package_can_be_taken_out_and_has_a_key_of_its_own(points: list) -> None:
    assert len({one.key for one in points}) == len(points) > 100
    for one in points:
        ast.parse(without((PACKAGE / one.file).read_text(), one))


def test_every_rule_that_leaves_something_out_does(points: list) -> None:
    used = {one.left_out for one in points}
    assert [one for one in OTHERS if one not in used] == []


def test_points_that_everybody_knows_are_there(points: list) -> None:
    found = {(one.file, one.where, one.text) for one in points if one.left_out is None}
    assert {
        ("lane.py", "Ticket.wait", "self._event.synchronize()"),
        ("input/transfer.py", "Mover._send_packed", "buffer.give_back(ticket)"),
        ("checkpoint/stage.py", "Stager._order", "staging.ticket.fence()"),
        ("pinned.py", "PinnedRing.take", "buffer._busy.settle()"),
    } <= found
    assert Path(PACKAGE / "lane.py").read_text().count("_event.synchronize()") == 1
