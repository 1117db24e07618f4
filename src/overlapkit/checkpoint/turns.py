"""Threads that take turns at a list of jobs: one computes while another waits for disk or network."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

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


def many_at_once(jobs: Iterable[Callable[[], object]], threads: int = 16) -> None:
    """Run jobs that mostly wait for the network, on threads of their own.

    Raises:
        Exception: What the first job that failed raised. Jobs that had not begun are not run then.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="overlapkit-read") as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            for one in running:
                one.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
