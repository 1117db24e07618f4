"""Agreement on a pass whose length some rank does not know: no batch is handed over before all have one."""

import contextlib
import json
from functools import partial
from typing import TYPE_CHECKING

from overlapkit.input.failed import Failed
from overlapkit.input.reader import Ended, Pulled
from overlapkit.input.uneven import ALONE, REMEDY, Cut, Filler, Outcome, Plan
from overlapkit.lane import Lane, Ticket
from overlapkit.quorum import RankFailed, await_keys

if TYPE_CHECKING:
    from overlapkit.input.ranks import Ranks

_HAS, _ENDED, _FAILED = 1, 1 << 20, 1 << 40
"""What a rank adds to a batch's counter: with fewer than a million ranks the three sums stay apart."""


class Agreed(Plan):
    """A lane of its own tells the other ranks of each batch, as far ahead as the reader is.

    A batch costs a rank four short calls to the store, the last one to have it five, and none of them blocks.

    Invariants:
        * A rank reports on a batch only when it knows what all ranks said about the one before.
        * The last rank to report on a batch gives the verdict, and deletes the keys of the one before.
        * A rank whose consumer fails says so under a key of its own, at which those look who wait.
        * Nothing here refers to the consumer's side, so a forgotten iterator is collected.

    Args:
        ranks: The job's.
        number: The pass.
        spare: There is a batch already that could be handed over again.
    """

    def __init__(self, ranks: "Ranks", number: int, spare: bool) -> None:
        self.repeats = ranks.mode == "join"
        self._ranks = ranks
        self._quorum = ranks.quorum
        self._key = f"{ranks.quorum.name}/agreed/{number}"
        self._broken = f"{self._key}/broken"
        self._spare = spare
        self._lane = Lane("agree", kind="thread")
        self._index = 0  # of the batch whose fate is open
        self._ended = False  # the source
        self._over = False  # nobody asks any more, or there is nothing to ask

    def follow(self, pull: Ticket[Outcome]) -> Ticket[Outcome]:
        """What becomes of a pull once all ranks have spoken."""
        return self._lane.submit(partial(self._agree, pull))

    def fail(self, error: BaseException) -> None:
        """Tell those who wait for this rank, at whatever batch."""
        text = f"rank {self._quorum.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # no store any more: what is wrong here comes first
            self._quorum.store.set(self._broken, text)
            self._ranks.litter.append(self._broken)

    def close(self, *, wait: bool) -> None:
        """Stop asking; the keys left are deleted once all ranks have begun another pass."""
        self._over = True
        if wait:
            self._lane.close()
            self._ranks.litter.append(self._at(self._quorum.rank))
            if self._quorum.rank == 0:
                for index in range(self._index - 2, self._index + 2):  # others may be one behind or ahead
                    self._ranks.litter += self._keys(index)

    def _agree(self, pull: Ticket[Outcome]) -> Outcome:
        if self._over:
            return None  # the pull may wait for this lane to end
        outcome = pull.wait()
        if self._over or (outcome is None and not self._ended):
            return None
        try:
            outcome = self._settle(outcome)
        except BaseException as error:
            outcome = Failed(error)
        self._over = self._over or not isinstance(outcome, Pulled | Filler)
        self._index += 1
        return outcome

    def _settle(self, outcome: Outcome) -> Outcome:
        """Say what this rank has for the batch, and learn what becomes of it."""
        self._ended = self._ended or isinstance(outcome, Ended)
        if self._ended and self.repeats and not self._index and not self._spare:
            outcome = Failed(
                ValueError("uneven='join': this rank has no batch that it could hand over again")
            )
        total = self._report(outcome)
        if isinstance(outcome, Failed) or total is None:
            return outcome
        if total >= _FAILED:
            errors = [f"rank {rank}: {text}" for rank, (_, _, text) in self._heard().items() if text]
            return Failed(RankFailed("; ".join(errors)))
        if total < _ENDED:
            return outcome
        if total % _ENDED == 0:
            return Ended()
        return self._go_on(outcome)

    def _go_on(self, outcome: Outcome) -> Outcome:
        """Some ranks have the batch, others are at their end."""
        mode, here = self._ranks.mode, f"after {self._index} batches of this pass"
        if mode == "join":
            return Filler() if self._ended else outcome
        if mode == "drop":
            return Ended() if self._ended else Cut(f"another rank ended {here}")
        ended = ", ".join(str(rank) for rank, (_, what, _) in self._heard().items() if what == _ENDED)
        return Failed(ValueError(f"uneven='error': rank(s) {ended} ended {here}, others have more: {REMEDY}"))

    def _report(self, outcome: Outcome) -> int | None:
        """Add this rank's word on a batch; return the sum of all, or None where it is not waited for.

        Raises:
            RankFailed: A rank did not report in time, or its consumer failed.
        """
        store, (counter, verdict) = self._quorum.store, self._keys(self._index)
        what, text = (_ENDED if self._ended else _HAS), ""
        if isinstance(outcome, Failed):
            what, text = _FAILED, f"{type(outcome.error).__name__}: {outcome.error}"
        store.set(self._at(self._quorum.rank), json.dumps([self._index, what, text]))
        total: int = store.add(counter, what)
        if sum(total // unit % _ENDED for unit in (_HAS, _ENDED, _FAILED)) == self._quorum.world:
            store.set(verdict, str(total))
            for key in self._keys(self._index - 1):
                store.delete_key(key)
            return total
        if what == _FAILED:
            return None  # its own error need not wait for the others
        broken = partial(store.check, [self._broken])
        if await_keys(store, [verdict], self._quorum.timeout, lambda: self._over or broken()):
            return int(store.get(verdict))
        if self._over:
            return None
        if broken():
            raise RankFailed(store.get(self._broken).decode())
        heard = self._heard()
        late = [rank for rank in range(self._quorum.world) if heard.get(rank, (-1,))[0] < self._index]
        raise RankFailed(
            f"rank(s) {', '.join(map(str, late))} did not come to batch {self._index + 1} of a pass within "
            f"{self._quorum.timeout:g} s: every rank must go on with the same passes, and be alive. {ALONE}"
        )

    def _heard(self) -> dict[int, tuple[int, int, str]]:
        """What each rank said last: about which batch, what, and its error."""
        store, keys = self._quorum.store, {rank: self._at(rank) for rank in range(self._quorum.world)}
        return {rank: tuple(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _at(self, rank: int) -> str:
        return f"{self._key}/at/{rank}"

    def _keys(self, index: int) -> tuple[str, str]:
        """A batch's counter and verdict."""
        return f"{self._key}/{index}", f"{self._key}/{index}/all"
