"""Times of collectives, against the formulas written out and against real ones."""

from unittest import mock

import pytest
from torch.distributed.device_mesh import init_device_mesh

from overlapkit.parallel import ring
from overlapkit.plan.links import OPS, Fabric, LinkTable, Wire
from overlapkit.plan.probing import probe_link
from tests.ranks import one_rank_group, run_ranks

ALPHA, BETA = 1e-3, 1e-9


def table(ranks: int = 4, sizes: tuple[int, ...] = (1000, 10**6, 10**8)) -> LinkTable:
    line = tuple((n, ALPHA + BETA * n) for n in sizes)
    twice = tuple((n, 2 * ALPHA + 2 * BETA * n) for n in sizes)
    return LinkTable(ranks, {"all_gather": line, "reduce_scatter": line, "all_reduce": twice})


def test_a_ring_in_one_node_over_nodes_and_between_copies() -> None:
    fabric = Fabric(Wire(400e9, 1e-6), Wire(40e9, 5e-6), node_size=8)
    assert fabric.seconds("all_gather", 8e9, 1) == 0.0
    assert fabric.seconds("all_gather", 8e9, 8) == pytest.approx(7e-6 + 8e9 * 7 / 8 / 400e9)
    # 16 ranks: 15 hops, one of them between the nodes; 8 ports a node carry 320 GB/s.
    assert fabric.seconds("reduce_scatter", 8e9, 16) == pytest.approx(14e-6 + 5e-6 + 8e9 * 15 / 16 / 320e9)
    assert fabric.seconds("all_reduce", 8e9, 16) == 2 * fabric.seconds("reduce_scatter", 8e9, 16)
    # One rank of each of four nodes: three hops of the network, over one port.
    assert fabric.seconds("all_reduce", 1e9, 4, stride=8) == pytest.approx(2 * (15e-6 + 1e9 * 3 / 4 / 40e9))
    # Two of a node, of four nodes.
    assert fabric.seconds("all_gather", 1e9, 8, stride=4) == pytest.approx(
        4e-6 + 3 * 5e-6 + 1e9 * 7 / 8 / 80e9
    )


def test_a_node_that_is_too_small_without_a_network_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"9 ranks, 1 apart, do not fit a node of 8.*give network=Wire"):
        Fabric(Wire(1e9)).seconds("all_gather", 1.0, 9)


def test_a_table_is_interpolated_and_its_line_is_followed_beyond() -> None:
    measured = table()
    alpha, beta = measured.line("all_gather")
    assert (alpha, beta) == (pytest.approx(ALPHA), pytest.approx(BETA))
    assert measured.seconds("all_gather", 500_500, 4) == pytest.approx(ALPHA + BETA * 500_500)
    assert measured.seconds("all_gather", 1000, 4) == ALPHA + BETA * 1000
    assert measured.seconds("all_gather", 10**9, 4) == pytest.approx(ALPHA + BETA * 10**9)
    # 8 ranks: 7 hops for 3, and 7/8 of the bytes for 3/4.
    assert measured.seconds("all_gather", 10**9, 8) == pytest.approx(
        ALPHA * 7 / 3 + BETA * 10**9 * (7 / 8) / (3 / 4)
    )
    assert measured.seconds("all_gather", 10**9, 1) == 0.0


def test_interpolation_follows_a_kink_that_no_line_does() -> None:
    rows = dict.fromkeys(OPS, ((10, 1.0), (20, 1.0), (30, 3.0)))
    assert LinkTable(2, rows).seconds("all_gather", 25, 2) == 2.0


def test_noise_makes_neither_latency_nor_bytes_negative() -> None:
    falling = LinkTable(2, dict.fromkeys(OPS, ((10, 2.0), (1000, 1.0))))
    assert falling.line("all_gather")[1] == 0.0
    steep = LinkTable(2, dict.fromkeys(OPS, ((100, 1e-06), (1000, 1.0))))
    assert steep.line("all_gather")[0] == 0.0
    assert steep.line("all_gather")[1] > 0.0


def test_json_brings_a_table_back() -> None:
    assert LinkTable.from_json(table().to_json()) == table()
    with pytest.raises(ValueError, match="no table of links: KeyError"):
        LinkTable.from_json("{}")
    with pytest.raises(ValueError, match="no table of links: JSONDecodeError"):
        LinkTable.from_json("[")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"all_gather": ((1, 1.0), (2, 2.0))}, "reduce_scatter has 0 message sizes"),
        (dict.fromkeys(OPS, ((1, 1.0),)), "all_gather has 1 message sizes"),
        (dict.fromkeys(OPS, ((2, 1.0), (1, 1.0))), "do not ascend"),
        (dict.fromkeys(OPS, ((1, 1.0), (2, 0.0))), "seconds of 2 bytes=0.0"),
        ({**dict.fromkeys(OPS, ((1, 1.0), (2, 1.0))), "broadcast": ()}, "'broadcast'"),
    ],
)
def test_a_table_with_a_hole_is_refused(rows: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinkTable(2, rows)


def test_a_probe_gives_all_ranks_one_table_of_what_they_measured() -> None:
    def probe(rank: int) -> tuple[str, str]:
        mesh, ours = init_device_mesh("cpu", (2,)), mock.Mock(wraps=ring.all_reduce)
        with mock.patch.object(ring, "all_reduce", ours):
            first = probe_link(mesh, sizes=(1001, 4096, 1 << 16), repeats=2)
        assert ours.call_count == 3 * 3, "what `replicate` does is timed"
        capped = probe_link(sizes=(16, 32, 64, 128), repeats=1, seconds=0.0)
        return first.to_json(), capped.to_json()

    (first, capped), second = run_ranks(2, probe)
    assert (first, capped) == second
    measured = LinkTable.from_json(first)
    assert (measured.ranks, measured.source) == (2, "measured between 2 ranks")
    for op in OPS:
        sizes, seconds = zip(*measured.rows[op], strict=True)
        assert sizes == (1008, 4096, 1 << 16)  # 1001 bytes as whole float32 of two ranks
        assert list(seconds) == sorted(seconds)
    sizes, seconds = zip(*measured.copies, strict=True)
    assert sizes == (1008, 4096, 1 << 16)
    assert list(seconds) == sorted(seconds)
    assert [n for n, _ in LinkTable.from_json(capped).rows["all_reduce"]] == [16, 32]


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="launch with torchrun"):
        probe_link()
    with one_rank_group():
        with pytest.raises(ValueError, match="one rank"):
            probe_link()
        with pytest.raises(ValueError, match=r"sizes=\[5\]"):
            probe_link(sizes=(5,))
        with pytest.raises(ValueError, match="2 dimensions"):
            probe_link(init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")))


def test_the_smallest_node_of_a_ring_sets_its_pace() -> None:
    fabric = Fabric(Wire(400e9), Wire(40e9), node_size=8)
    assert fabric.seconds("all_gather", 12e9, 12) == pytest.approx(12e9 * 11 / 12 / 160e9)  # 4 ports


def test_a_table_goes_on_from_its_ends_without_a_jump() -> None:
    rows = dict.fromkeys(OPS, ((1000, 0.003), (10**6, 0.004), (10**8, 0.5)))
    bent = LinkTable(4, rows)
    assert bent.seconds("all_gather", 10**8 + 1, 4) == pytest.approx(0.5, rel=1e-6)
    assert bent.seconds("all_gather", 999, 4) == pytest.approx(0.003, rel=1e-3)
    assert bent.seconds("all_gather", 2 * 10**8, 4) > 0.5


def test_copies_are_interpolated_and_go_on_in_proportion() -> None:
    copying = LinkTable(2, table().rows, copies=((1000, 0.001), (2000, 0.004)))
    found = [copying.copy_seconds(nbytes) for nbytes in (0, 10, 1500, 2000, 8000)]
    assert found == pytest.approx([0.0, 0.001, 0.0025, 0.004, 0.016])
    assert table().copy_seconds(1000) == 0.0
    assert LinkTable.from_json(copying.to_json()) == copying
    with pytest.raises(ValueError, match="copies: the sizes do not ascend"):
        LinkTable(2, table().rows, copies=((2, 1.0), (1, 1.0)))
    with pytest.raises(ValueError, match="copy_bytes_per_s=0"):
        Fabric(Wire(1e9), copy_bytes_per_s=0)
