"""Which batches there are, from any place of any epoch on."""

from collections.abc import Iterator

import numpy as np

from overlapkit.input.images.engine import Crop
from overlapkit.input.images.job import Job
from overlapkit.input.order import BLOCK, Order
from overlapkit.input.targets import IGNORED


class Schedule:
    """Cuts this rank's share of an order into batches.

    Every rank has equally many batches, of equal sizes; with the order's `drop_last` whole ones only. With
    `shuffle` a sample that is dealt a second time to make ranks even counts like any other; without, it is
    labelled IGNORED.

    Args:
        order: Who takes which file when.
        labels: Of all files, int64 (n,).
        crop: Draws the random numbers of a sample.
        batch_size: Images in a batch.

    Attributes:
        order: As given.
    """

    def __init__(self, order: Order, labels: np.ndarray, crop: Crop, batch_size: int) -> None:
        self.order = order
        self._labels = labels
        self._crop = crop
        self._size = batch_size

    def batches(self, position: int) -> int:
        """Batches that this rank takes of an epoch's rest after `position`."""
        share = self.order.share(position)
        return share // self._size if self.order.drop_last else -(-share // self._size)

    def jobs(self, epoch: int, position: int) -> Iterator[Job]:
        """The batches of an epoch after `position`, then those of the next epochs, without end."""
        while True:
            yield from self._pass(epoch, position)
            epoch, position = epoch + 1, 0

    def _pass(self, epoch: int, position: int) -> Iterator[Job]:
        batches, step = self.batches(position), max(1, BLOCK // self._size)
        share = self.order.share(position)
        for first in range(0, batches, step):
            start, stop = first * self._size, min(share, (first + step) * self._size)
            samples = self.order.samples(epoch, position, start, stop)
            labels = self._labels[samples]
            if not self.order.shuffle:
                places = position + np.arange(start, stop) * self.order.world + self.order.rank
                labels[places >= self.order.size] = IGNORED
            for number in range(first, min(first + step, batches)):
                one = slice((number - first) * self._size, (number - first + 1) * self._size)
                drawn = self._crop.draw(samples[one], epoch)
                yield Job((epoch, position, number), samples[one], labels[one], drawn)
