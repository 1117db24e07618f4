"""Which file system a path lies on, from /proc/self/mountinfo: without touching it, a server may be dead."""

import os
import re
from typing import NamedTuple

from overlapkit.doctor.machine import Machine, Unreadable

_SERVED = """
9p afs beegfs ceph cifs fuse.blobfuse2 fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.mount-s3 fuse.s3fs
fuse.sshfs glusterfs gpfs lustre nfs nfs4 panfs pvfs2 smb3 smbfs virtiofs wekafs
"""
NETWORK = frozenset(_SERVED.split())
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system: where, its type, what of, and its options."""

    where: str
    kind: str
    source: str
    options: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        """Whether another machine serves it."""
        return self.kind in NETWORK

    @property
    def is_memory(self) -> bool:
        """Whether it lies in memory."""
        return self.kind in ("tmpfs", "ramfs")

    @property
    def read_only(self) -> bool:
        """Whether it takes no writes."""
        return "ro" in self.options

    def __str__(self) -> str:
        return f"{self.kind} ({self.source}, at {self.where})"


def mount_of(machine: Machine, path: str) -> Mount:
    """The file system that holds an absolute path.

    Raises:
        Unreadable: This system does not say.
    """
    whole = os.path.normpath(path)
    best: Mount | None = None
    for line in machine.text("/proc/self/mountinfo").splitlines():
        head, sign, tail = line.partition(" - ")
        before, after = head.split(), tail.split()
        if not sign or len(before) < 6 or len(after) < 3:
            continue
        where = _plain(before[4])
        inside = where == "/" or whole == where or whole.startswith(f"{where}/")
        if inside and (best is None or len(where) >= len(best.where)):  # the later of two covers the former
            options = (*before[5].split(","), *after[2].split(","))
            best = Mount(where, after[0], _plain(after[1]), options)
    if best is None:
        raise Unreadable(f"/proc/self/mountinfo names no file system of {path}")
    return best


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
