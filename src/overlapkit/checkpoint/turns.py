"""Two threads that take turns at a list of jobs: one computes while the other waits for the disk."""

from collections import deque
from collections.abc import Callable, Iterable

from overlapkit.lane import Lane


def take_turns(jobs: Iterable[Callable[[], object]], helper: Lane) -> None:
    """Run jobs, on this thread and on the helper's; each takes the next one that is left.

    Raises:
        Exception: What a job raised. Jobs that had not begun are not run then; none runs any more.
    """
    queue = deque(jobs)

    def work() -> None:
        while True:
            try:
                job = queue.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException:
                queue.clear()
                raise

    if len(queue) < 2:
        work()
        return
    other = helper.submit(work)
    try:
        work()
    except BaseException:
        other.settle()
        other.seen = True  # one error is raised; the other thread's would come again when its lane is closed
        raise
    other.wait()
