"""Bytes of device tensors, gathered by a thread that knows nothing of the streams that wrote them."""

import threading

import torch

from overlapkit.checkpoint.gather import Gathered
from tests.cuda_fake import fake_cuda


def test_what_a_stream_still_writes_is_there_before_another_thread_reads_it() -> None:
    with fake_cuda() as machine:
        found: list[bytes] = []
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors = [torch.full((4,), k, dtype=torch.uint8, device="cuda") for k in (1, 2)]
            gathered = Gathered([0, 4], tensors)
        reader = threading.Thread(target=lambda read=gathered: found.append(bytes(read(1, 7))))
        reader.start()
        reader.join()
        assert found == [bytes([1, 1, 1, 2, 2, 2])]
        assert machine.faults == []
        del gathered, tensors, reader
