"""When a job hangs, and who is missing: tables of what ranks said, with the answer."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from overlapkit.measure.across.hang import HangReport, Statement, hangs, make_report
from overlapkit.measure.across.sequence import Issues
from overlapkit.measure.across.where import Where


def where(step=7, phase="backward", turns=4, still=10.0, *, inside=True, left=False, host="far", pid=1):
    return Where(step, inside, phase, turns, still, None, left, host, pid, 1, 0.0)


STUCK = where()


@pytest.mark.parametrize(
    ("own", "others", "silent", "hang"),
    [
        (STUCK, [STUCK, STUCK], {}, True),
        (where(still=4.9), [STUCK, STUCK], {}, False),
        (STUCK, [STUCK, where(still=1.0)], {}, False),  # slow, but it moves: everybody waits for it
        (STUCK, [STUCK, where(still=4.6)], {}, True),  # it said so half a second ago
        (STUCK, [STUCK, where(phase="paused", still=0.0)], {}, False),  # an evaluation on one rank
        (where(inside=False), [where(inside=False)] * 2, {}, False),  # after the last step: an export
        (where(inside=False), [STUCK, STUCK], {}, False),  # others, inside, will say so
        (STUCK, [where(inside=False)] * 2, {}, True),
        (STUCK, [STUCK, where(left=True, still=0.0)], {}, True),
        (where(left=True), [STUCK, STUCK], {}, False),
        (STUCK, [STUCK, where(still=0.1)], {2: 4.5}, True),  # stopped in full career
        (STUCK, [STUCK, where(still=0.1)], {2: 4.0}, False),  # a hiccup
        (STUCK, [], {}, True),  # one process
    ],
)
def test_a_job_hangs_when_nobody_moves(own, others, silent, hang):
    assert hangs(own, dict(enumerate(others, 1)), silent, 5.0) == hang


A, B = "all_reduce (4,) Float", "all_gather (4,) Float"


def issued(*texts):
    kinds = sorted(set(texts))
    return Issues(tuple(kinds), {"": (5, np.array([kinds.index(text) for text in texts]))})


def told(one, stack="wait", given=None):
    return Statement(one, f'Thread Main (trains)\n  File "{stack}.py", line 3, in {stack}\n', given)


def report(wheres, *, silent=None, statements=None, stacks=None, given=None, unheard=()):
    said = dict(enumerate(wheres))
    silent = silent or {}
    answers = statements or {
        rank: told(one, (stacks or {}).get(rank, "wait"), (given or {}).get(rank))
        for rank, one in said.items()
        if rank not in silent and not one.left
    }
    made = make_report(answers, said, silent, 12.0, unheard)
    assert HangReport.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    return made


def test_a_rank_in_an_earlier_phase_or_step_is_missing():
    behind = report([STUCK, where(phase="forward", turns=3), STUCK], stacks={1: "sleep"})
    assert (behind.missing, behind.step, behind.phase) == ((1,), 7, "forward")
    assert list(behind.stacks) == [1]
    text = str(behind)
    assert text.startswith("overlapkit: the job hangs: no rank has made progress for 12.0 s")
    assert "missing: rank 1: step 7, forward, where others have come further" in text
    assert "rank 0, 2: step 7, backward" in text
    assert "Python stacks of rank 1:" in text
    assert 'File "sleep.py"' in text
    outside = report([STUCK, STUCK, where(7, "outside", 1, inside=False)])
    assert (outside.missing, outside.step, outside.phase) == ((2,), 7, "outside")
    assert report([where(step=6), STUCK, STUCK]).missing == (0,)


def test_in_the_same_phase_who_has_issued_fewer_collectives_is_missing():
    found = report([STUCK] * 3, given={0: issued(A, B), 1: issued(A), 2: issued(A, B)})
    assert found.missing == (1,)
    assert "it has issued 5 collectives; others wait in the next, all_gather (4,) Float" in found.why


def test_a_collective_that_does_not_match_is_named_with_both_sides():
    found = report([STUCK] * 3, given={0: issued(A, A), 1: issued(A, A), 2: issued(A, B)})
    assert found.missing == (2,)
    assert (found.mismatch.issued, found.mismatch.others) == (B, A)
    assert f"collectives differ: collective 6: rank 2 issued {B}, the others {A}" in str(found)


def test_without_any_record_the_odd_place_in_the_code_is_told():
    found = report([STUCK] * 3, stacks={2: "sleep"})
    assert found.missing == (2,)
    assert 'at another place: File "sleep.py", line 3, in sleep' in found.why


def test_where_all_are_alike_nobody_is_accused():
    found = report([STUCK] * 3)
    assert found.missing == ()
    assert "missing: cannot be told: all ranks are at the same place" in str(found)
    assert sorted(found.stacks) == [0, 1, 2]


def test_a_rank_that_left_is_what_others_wait_for():
    found = report([STUCK, where(7, "outside", 0, left=True, inside=False), STUCK])
    assert found.missing == (1,)
    assert "has closed its meter before step 7; others are in step 7: do all ranks make as many" in found.why


def test_a_silent_rank_comes_before_all_others():
    found = report([STUCK, where(still=0.1), where(phase="forward", turns=3)], silent={1: 31.0})
    assert (found.missing, found.step, found.phase) == ((1,), 7, "backward")
    assert (
        "not heard of for 31.0 s: process 1 on far has died, is stopped, or holds Python's lock" in found.why
    )
    assert found.stacks == {}


def test_what_became_of_a_process_of_this_machine_is_looked_up():
    here = os.uname().nodename
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, 19)
        os.waitpid(child.pid, os.WUNTRACED)
        found = report([STUCK, where(host=here, pid=child.pid)], silent={1: 3.0})
        assert f"process {child.pid} on {here} is stopped (SIGSTOP, or a debugger)" in found.why
    finally:
        child.kill()
        child.communicate()
    assert f"process {child.pid} on {here} has ended" in (
        report([STUCK, where(host=here, pid=child.pid)], silent={1: 3.0}).why
    )


def test_a_rank_that_was_never_heard_of_is_named_where_nobody_else_is_behind():
    found = report([STUCK, STUCK], unheard=[2])
    assert (found.missing, found.step, found.where[2]) == ((2,), None, "never heard of")
    assert "rank 2: never heard of: it made no StepMeter" in str(found)
    assert report([STUCK, where(step=6)], unheard=[2]).missing == (1,)


def test_many_ranks_make_a_short_text():
    found = report([STUCK] * 500 + [where(phase="forward", turns=3)] * 12)
    assert len(found.missing) == 12
    assert len(found.stacks) == 4
    assert "rank 0, 1, 2, 3, 4, 5, 6, 7 and 492 more: step 7, backward" in str(found)
