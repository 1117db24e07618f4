"""One run under fire: starts lives, makes things go wrong, and sees that the job goes on or stops rightly."""

import json
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import netlab
from chaos_inject import BETWEEN, HELD, Event, inject
from chaos_job import Job, Logs, Records, send
from chaos_judge import Losses, Shape, Verdict, judge, usages
from chaos_life import Life
from chaos_place import Place
from chaos_plan import Fault, Setting
from chaos_rank import Spec

BOUND_S = 120.0
"""A job hangs that writes no record, or has not recovered, for so long: each of its own bounds is shorter."""
_LAST_STEPS = 8  # without a new fault, so that none comes too late to matter
_EARLY_S = 0.6  # a rank takes about so long to its first step


@dataclass
class Outcome:
    """What came of a run."""

    setting: Setting
    events: list[Event]
    lives: list[Life]
    verdict: Verdict
    seconds: float

    def title(self) -> str:
        """Which run it was."""
        setting = self.setting
        ranks = " and ".join(map(str, setting.worlds))
        failed = "ends the job" if setting.stop else "is passed over"
        return (
            f"run {setting.number}: {setting.launcher}, {setting.wrap}, {ranks} ranks, a failed save {failed}"
        )

    def story(self) -> list[str]:
        """A line for each fault."""
        return [event.line() for event in self.events]

    def growth(self, what: str) -> int:
        """The most by which "rss" (KiB) or "fds" grew in a life."""
        return max((end[what] - begin[what] for life in self.lives for begin, end in usages(life)), default=0)


class Run:
    """One run, from its first step to its last.

    Args:
        setting: How it is set up.
        faults: What goes wrong, in order.
        place: Its folders.
        spec: What ranks are told.
        shape: What it should come to.
        lab: The hosts, where its launcher is "lab".
        until: No new fault from then on, of `time.monotonic`.
    """

    def __init__(
        self,
        setting: Setting,
        faults: Iterator[Fault],
        place: Place,
        spec: Spec,
        shape: Shape,
        lab: netlab.Lab | None = None,
        until: float = float("inf"),
    ) -> None:
        self.setting, self.place, self.spec, self.shape, self.lab = setting, place, spec, shape, lab
        self.logs = Logs(place.logs)
        self.lives: list[Life] = []
        self.events: list[Event] = []
        self.wrong: list[str] = []
        self._faults, self._until = faults, until
        self._next = next(faults, None)
        self._early: Fault | None = None  # a kill that waits for the next start
        self._life = self._turn = 0  # of starts; of the numbers of ranks
        self._flipped: set[int] = set()
        self._spoilt = ""  # the data shard that the next life must refuse
        self._since = (0, 0), 0  # start and step from which the next fault's `after` counts

    def go(self, references: Mapping[int, Losses]) -> Outcome:
        """Run to the end, and judge."""
        began = time.monotonic()
        self._to_the_end()
        verdict = Verdict(self.wrong)
        if not self.wrong:
            verdict = judge(self.lives, references, self.shape)
        return Outcome(self.setting, self.events, self.lives, verdict, time.monotonic() - began)

    def undisturbed(self) -> Losses:
        """Run to the end; what the others are compared with."""
        self._to_the_end()
        if self.wrong or len(self.lives) > 1:
            raise RuntimeError(f"the undisturbed run fails: {self.wrong}; see {self.place.logs}")
        return {step: [one["loss"] for one in found] for step, found in self.lives[0].steps().items()}

    def _to_the_end(self) -> None:
        while not self.wrong and not (self.lives and len(self.lives[-1].of("over")) == self.lives[-1].world):
            self._live()
        for event in self._open():  # the run was over first
            event.recovered = time.time() if event.kind in HELD else None
        self.events = [event for event in self.events if event.recovered is not None or self.wrong]

    def _live(self) -> None:
        """One start of launcher and ranks, until all have ended."""
        self._life += 1
        world = self.setting.worlds[self._turn % len(self.setting.worlds)]
        spec = self.place.control / "spec.json"
        spec.write_text(json.dumps(asdict(replace(self.spec, life=self._life))))
        output = self.place.logs / f"{self._life:04d}-out"
        restarts = 0 if self._spoilt else 20
        self.logs.news = time.monotonic()
        job = Job(spec, self._life, world, self.setting.launcher, self.lab, output, restarts)
        try:
            self._attend(job)
        finally:
            for event in self._open():
                self._end(event)
            if orphans := job.orphans():
                self.wrong.append(f"life {self._life}: orphans: {orphans}")
        self.logs.poll(self._life)
        self._look_at_events()
        self._note_lives(world)
        if not self.wrong:
            self._between()

    def _attend(self, job: Job) -> None:
        while not job.over():
            self.logs.poll(self._life)
            self._look_at_events()
            open_for = max((time.time() - (event.over or event.t) for event in self._open()), default=0.0)
            if max(time.monotonic() - self.logs.news, open_for) > BOUND_S:
                self._give_up(job)
                return
            self._maybe_inject(job)
            time.sleep(0.01)

    def _give_up(self, job: Job) -> None:
        """It hangs: let every rank write down its stacks, and end it."""
        latest = self.logs.latest(self._life)
        for records in (latest[1] if latest else {}).values():
            send(records[0]["pid"], signal.SIGUSR1)
        time.sleep(2.0)
        faults = [str(event.fault) for event in self._open()]
        self.wrong.append(
            f"life {self._life} hangs: it has not gone on for {BOUND_S:g} s after {faults or 'nothing'}; "
            f"stacks are in {self.place.logs}"
        )
        job.kill()

    def _open(self) -> list[Event]:
        return [event for event in self.events if event.recovered is None]

    def _look_at_events(self) -> None:
        """End what has lasted, and see what the job has recovered from."""
        latest = self.logs.latest(self._life)
        for event in self._open():
            if event.undo is not None and self._is_enough(event):
                self._end(event)
            if event.undo is None and latest is not None:
                self._maybe_recovered(event, *latest)

    def _is_enough(self, event: Event) -> bool:
        """Whether a fault has lasted as long as it should: "freeze" until the others have given up."""
        if event.kind == "freeze":
            return time.time() - event.t > 2 * self.spec.hang or "the job hangs" in self._output(
                event.start[0]
            )
        if self.setting.stop and event.kind in ("full", "read-only"):
            ranks = self.logs.records[event.start].values()
            failed = (one for records in ranks for one in records if one["kind"] == "save failed")
            if any(one["t"] > event.t for one in failed):
                return True  # the job ends, and would not begin again like this
        return time.time() - event.t > event.fault.seconds

    def _output(self, life: int) -> str:
        return "".join(path.read_text() for path in sorted(self.place.logs.glob(f"{life:04d}-out-*")))

    def _end(self, event: Event) -> None:
        if event.undo is not None:
            event.undo()
            event.undo, event.over = None, time.time()

    def _maybe_recovered(self, event: Event, start: tuple[int, int], ranks: dict[int, Records]) -> None:
        what = "committed" if event.kind in ("full", "read-only") else "step"
        if event.kind not in HELD and start <= event.start:
            return
        after = event.over or event.t
        news = next((one for one in ranks.get(0, ()) if one["kind"] == what and one["t"] > after), None)
        if news is not None:
            event.recovered = news["t"]
            self._since = start, news["step"]

    def _maybe_inject(self, job: Job) -> None:
        """The next fault, when its time has come."""
        latest = self.logs.latest(self._life)
        if latest is None or len(latest[1]) < job.world:
            return
        start, ranks = latest
        born = max(records[0]["t"] for records in ranks.values())
        if self._early is not None:
            if start > self.events[-1].start and time.time() > born + self._early.share * _EARLY_S:
                self._inject(job, self._early, start, ranks)
                self._early = None
        elif self._next is None and not self._open():
            self.place.set_pace(0)
        elif self._next is not None and time.monotonic() < self._until and self._is_due(start, ranks):
            fault, self._next = self._next, next(self._faults, None)
            if fault.kind == "kill early":
                self._early, fault = fault, replace(fault, kind="kill")
            self._inject(job, fault, start, ranks)

    def _is_due(self, start: tuple[int, int], ranks: dict[int, Records]) -> bool:
        fault, taken = self._next, [one for one in ranks[0] if one["kind"] == "step"]
        if fault is None or not taken or taken[-1]["step"] > self.spec.steps - _LAST_STEPS:
            return False
        if open_now := self._open():
            lasting = all(event.undo is not None and event.kind in HELD for event in open_now)
            return lasting and fault.joins and time.time() > open_now[-1].t + 3 * fault.delay_s
        since = self._since[1] if self._since[0] == start else taken[0]["step"]
        reached = next((one for one in taken if one["step"] >= since + fault.after), None)
        return reached is not None and time.time() > reached["t"] + fault.delay_s

    def _inject(self, job: Job, fault: Fault, start: tuple[int, int], ranks: dict[int, Records]) -> None:
        if fault.kind == "flip" and len(set(self.place.steps()) - self._flipped) < 2:
            fault = replace(fault, kind="kill all")  # nothing sound would be left
        rank = fault.rank % job.world
        step = max((one["step"] for one in ranks[0] if one["kind"] == "step"), default=0)
        event = Event(fault, time.time(), start, rank, step)
        self.events.append(event)
        event.undo = inject(fault, job, ranks[rank][0]["pid"], rank, self.place, self.lab)

    def _note_lives(self, world: int) -> None:
        """Keep what was written, and who was hit by what."""
        for start, ranks in sorted(self.logs.records.items()):
            if start[0] == self._life:
                born = min(records[0]["t"] for records in ranks.values())
                life = Life(f"{start[0]}.{start[1]}", world, ranks, set(self._flipped))
                life.faults = [
                    (event.kind, event.rank)
                    for event in self.events
                    if event.start == start
                    or (event.kind in HELD and event.t < born < (event.over or 0) + 1.0)
                ]
                life.spoilt, life.output = self._spoilt, self._output(start[0])
                self.lives.append(life)
                self._flipped -= {one["step"] for one in life.of("committed")}
        if not self.logs.latest(self._life):
            self.wrong.append(f"life {self._life}: no rank began: {self._output(self._life)[-2000:]}")

    def _between(self) -> None:
        """While the job is down: what can only happen then."""
        if self._spoilt:
            self.place.mend_shards()
            self._spoilt = ""
            return
        waiting = [event for event in self._open() if event.kind in BETWEEN and not event.note]
        for event in waiting:
            if event.kind == "resize":
                self._turn += 1
                event.note = f"{self.setting.worlds[self._turn % len(self.setting.worlds)]} ranks"
            elif event.kind == "shard":
                event.note = self._spoilt = self.place.spoil_shard(event.fault.share)
            else:
                step, event.note = self.place.flip(event.fault.share, self._flipped)
                self._flipped.add(step)
