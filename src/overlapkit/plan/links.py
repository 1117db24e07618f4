"""How long a collective takes: a table measured on this job's ranks, or a fabric that the user describes.

The model is alpha-beta (R. W. Hockney, The communication challenge for MPP, Parallel Computing 20, 1994) with
the bytes of a ring: P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, J. Parallel Distrib. Comput. 69 (2009).
"""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from overlapkit.alpha_beta import fit_line
from overlapkit.plan.arguments import check_amount, check_ranks
from overlapkit.plan.stored import Stored

OPS = ("all_gather", "reduce_scatter", "all_reduce")
"""The collectives of sharded and replicated training."""

_TURNS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often a ring passes all data round: an all-reduce is a reduce-scatter and an all-gather."""


class Link(Protocol):
    """What the simulation asks of a network."""

    source: str
    """Where its figures come from, for the report."""

    def seconds(self, op: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """How long a collective takes.

        Args:
            op: One of OPS.
            nbytes: Of the whole: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor.
            ranks: That take part.
            stride: Distance of one to the next in the job's order of ranks: on a mesh of copies by shards,
                the copies of one shard are as many ranks apart as there are shards.
        """

    def copy_seconds(self, nbytes: float) -> float:
        """How long a rank copies so many bytes into or out of a flat buffer."""


@dataclass(frozen=True)
class Wire:
    """One kind of connection.

    Args:
        bytes_per_s: What a ring of ranks moves over it a second in one direction ("bus bandwidth").
        latency_s: Of one hop of the ring.

    Raises:
        TypeError: A figure is no number.
        ValueError: It is out of range.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_amount("bytes_per_s", self.bytes_per_s, above=0)
        check_amount("latency_s", self.latency_s)


@dataclass(frozen=True)
class Fabric:
    """Nodes of ranks on a fast connection, joined by a slower one.

    A ring over all ranks enters and leaves each node once, and there are as many rings as a node has network
    ports: so it moves what the slower of the two connections moves, each taken for all ranks of a node
    together. Hops inside a node cost the one latency, hops between nodes the other.

    Args:
        node: Between the ranks of one node: what each of them sends and receives a second.
        network: Between nodes, for each rank of a node (its own port, or its share of the ports). None where
            there is one node.
        node_size: Ranks a node.
        source: Where the figures come from.
        copy_bytes_per_s: What a rank copies into or out of a flat buffer a second; None where that is to take
            no time.

    Raises:
        TypeError: A figure is no number.
        ValueError: It is out of range.
    """

    node: Wire
    network: Wire | None = None
    node_size: int = 8
    source: str = "given"
    copy_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_ranks("node_size", self.node_size)
        if self.copy_bytes_per_s is not None:
            check_amount("copy_bytes_per_s", self.copy_bytes_per_s, above=0)

    def copy_seconds(self, nbytes: float) -> float:
        """See Link."""
        return 0.0 if self.copy_bytes_per_s is None else nbytes / self.copy_bytes_per_s

    def seconds(self, op: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """See Link.

        Raises:
            ValueError: More ranks than a node has, and no network.
        """
        if ranks == 1:
            return 0.0
        inside = max(1, min(self.node_size // stride, ranks))  # of one node
        nodes = -(-ranks // inside)
        hops, rate = (ranks - 1) * self.node.latency_s, self.node.bytes_per_s
        if nodes > 1:
            if self.network is None:
                raise ValueError(
                    f"{ranks} ranks, {stride} apart, do not fit a node of {self.node_size}, and the fabric "
                    "has no network: give network=Wire(...)"
                )
            hops = (ranks - nodes) * self.node.latency_s + (nodes - 1) * self.network.latency_s
            fewest = ranks - (nodes - 1) * inside  # in the last node, which all rings pass as well
            across = self.network.bytes_per_s * fewest
            rate = min(rate, across) if inside > 1 else across
        return _TURNS[op] * (hops + nbytes * (ranks - 1) / ranks / rate)


@dataclass(frozen=True)
class LinkTable(Stored):
    """What `probe_link` measured: for each collective, seconds by message size.

    Between two sizes it is interpolated; beyond them, and for other numbers of ranks, it goes on as the
    line of least relative error through all of them does, as a ring's.

    Attributes:
        ranks: That were measured.
        rows: For each of OPS, pairs of bytes and seconds, bytes ascending.
        source: Where they come from.
        copies: Pairs of bytes and seconds, too: of a rank's copy into a buffer that is new. Empty where it
            was not measured, and takes no time.

    Raises:
        ValueError: A collective is missing, has fewer than two sizes, or figures that make no sense.
    """

    ranks: int
    rows: Mapping[str, Sequence[tuple[int, float]]]
    source: str = "measured"
    copies: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        check_ranks("ranks", self.ranks, least=2)
        for op in OPS:
            rows = self.rows.get(op)
            if rows is None or len(rows) < 2:
                raise ValueError(
                    f"rows: {op} has {len(rows or ())} message sizes; a line needs two or more of each of "
                    f"{', '.join(OPS)}: measure them with probe_link"
                )
            _check_rows(f"rows[{op!r}]", rows)
        _check_rows("copies", self.copies)
        if unknown := set(self.rows) - set(OPS):
            raise ValueError(f"rows: {sorted(unknown)} are none of {', '.join(OPS)}")

    def line(self, op: str) -> tuple[float, float]:
        """(alpha, beta): seconds = alpha + beta * bytes, of least relative error, neither negative."""
        return fit_line(self.rows[op])

    def seconds(self, op: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """See Link; one measured table has one kind of link, however far ranks are apart."""
        if ranks == 1:
            return 0.0
        rows = self.rows[op]
        inside = min(max(nbytes, rows[0][0]), rows[-1][0])
        alpha, beta = self.line(op)
        hops = (ranks - 1) / (self.ranks - 1)
        share = (ranks - 1) / ranks / ((self.ranks - 1) / self.ranks)
        beyond = (alpha * hops + beta * nbytes * share) / (alpha + beta * inside)
        return _between(rows, inside) * beyond

    def copy_seconds(self, nbytes: float) -> float:
        """See Link; beyond the largest copy that was measured, in proportion."""
        if not self.copies:
            return 0.0
        inside = min(max(nbytes, self.copies[0][0]), self.copies[-1][0])
        return _between(self.copies, inside) * max(1.0, nbytes / inside) if nbytes else 0.0

    def to_json(self) -> str:
        """The table as JSON."""
        rows = {op: [list(row) for row in self.rows[op]] for op in OPS}
        copies = [list(row) for row in self.copies]
        data = {"ranks": self.ranks, "source": self.source, "rows": rows, "copies": copies}
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The table that `to_json` wrote.

        Raises:
            ValueError: It is none.
        """
        try:
            data: Any = json.loads(text)
            rows = {op: tuple((row[0], row[1]) for row in data["rows"][op]) for op in data["rows"]}
            copies = tuple((row[0], row[1]) for row in data.get("copies", ()))
            return cls(data["ranks"], rows, str(data["source"]), copies)
        except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"no table of links: {type(error).__name__}: {error}") from error


def _check_rows(name: str, rows: Sequence[tuple[int, float]]) -> None:
    for nbytes, seconds in rows:
        check_ranks(f"{name}: bytes", nbytes)
        check_amount(f"{name}: seconds of {nbytes} bytes", seconds, above=0)
    sizes = [nbytes for nbytes, _ in rows]
    if sorted(set(sizes)) != sizes:
        raise ValueError(f"{name}: the sizes do not ascend: {sizes}")


def _between(rows: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Interpolated; `nbytes` is not beyond the rows."""
    after = bisect.bisect_left(rows, nbytes, key=lambda row: row[0])
    (large, more), (small, less) = rows[after], rows[max(after - 1, 0)]
    return more if large == small else less + (more - less) * (nbytes - small) / (large - small)
