"""Where a run lives: a disk that can be full, read-only or slow, and data that can be spoilt."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

PREFIX = "ok-chaos-"
_KEPT, _DISK = "kept", "24m"


def missing() -> str | None:
    """Why a file system of one's own cannot be had; None where it can."""
    if os.geteuid() != 0:
        return "a full and a read-only disk need root"
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    )
    return None if tried.returncode == 0 else "this root may not mount file systems"


class Place:
    """The folders of one run, below one that is there.

    Args:
        root: Theirs.
        data: Sound token shards; they are copied.
        own_disk: Whether the checkpoints get a file system of their own.
    """

    def __init__(self, root: Path, data: Path, own_disk: bool) -> None:
        self.store, self.control, self.logs = root / "store", root / "control", root / "logs"
        self.data = root / "data"
        self._sound = data
        self._own_disk = own_disk
        for folder in (self.store, self.control, self.logs):
            folder.mkdir(parents=True)
        shutil.copytree(data, self.data)
        if own_disk:
            _call("mount", "-t", "tmpfs", "-o", f"size={_DISK}", "ok-chaos", str(self.store))
        self.run = self.store / "run"
        self.run.mkdir()

    def close(self) -> None:
        """Give the file system back."""
        self.make_writable()
        if self._own_disk:
            _call("umount", "-l", str(self.store))
            self._own_disk = False

    def fill(self, left: int) -> None:
        """Leave so many bytes of the disk."""
        file = self.store / "filler"
        room = os.statvfs(self.store)
        with open(file, "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(4096, room.f_bavail * room.f_frsize - left))

    def free(self) -> None:
        """Undo `fill`."""
        (self.store / "filler").unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Whoever comes by the path finds a read-only file system; who has files open there goes on."""
        _call("mount", "--bind", str(self.store), str(self.store))
        _call("mount", "-o", "remount,bind,ro", str(self.store))

    def make_writable(self) -> None:
        """Undo `make_read_only`."""
        while _mounts(self.store) > 1:
            _call("umount", "-l", str(self.store))

    def make_slow(self, seconds: float) -> None:
        """Let each write and sync of a checkpoint take so many seconds more; 0 undoes it."""
        self._say("slow", f"{seconds:.3f}" if seconds else "")

    def set_pace(self, seconds: float) -> None:
        """Let each step take so many seconds more; 0 undoes it."""
        self._say("pace", f"{seconds:.3f}" if seconds else "")

    def tell_source(self, rank: int, text: str) -> None:
        """Let a rank's source raise ("raise") or stall (seconds) once; "" takes it back."""
        self._say(f"source-{rank}", text)

    def steps(self) -> list[int]:
        """The checkpoints there are."""
        return sorted(int(path.name.split("-")[1]) for path in self.run.glob("step-*"))

    def flip(self, share: float, spared: set[int]) -> tuple[int, str]:
        """Flip a bit of the newest checkpoint but for `spared`; returns its step, and where."""
        step = max(set(self.steps()) - spared)
        files = sorted((self.run / f"step-{step}").iterdir())
        place = share * len(files)
        file = files[int(place)]
        at = int(place % 1.0 * file.stat().st_size)
        with open(file, "r+b") as opened:
            opened.seek(at)
            was = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([was ^ 1 << (at % 8)]))
        return step, f"byte {at} of step-{step}/{file.name}"

    def spoil_shard(self, share: float) -> str:
        """Cut a data shard short, or spoil its header; returns its name."""
        shards = sorted(self.data.iterdir())
        place = share * len(shards)
        shard, how = shards[int(place)], place % 1.0
        if how < 0.5:
            os.truncate(shard, int(shard.stat().st_size * 2 * how))
        else:
            with open(shard, "r+b") as opened:
                opened.seek(8 + int(how * 20))
                opened.write(b"\0\0")
        return shard.name

    def mend_shards(self) -> None:
        """Undo `spoil_shard`."""
        shutil.copytree(self._sound, self.data, dirs_exist_ok=True)

    def _say(self, name: str, text: str) -> None:
        if not text:
            (self.control / name).unlink(missing_ok=True)
            return
        half = self.control / f".{name}"
        half.write_text(text)
        half.rename(self.control / name)


def keep(root: Path) -> None:
    """Let `sweep` leave a folder alone: somebody will want to read what is in it."""
    (root / _KEPT).touch()


def sweep(parent: Path) -> None:
    """Remove the folders, and file systems, of benchmarks that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists() and not (folder / _KEPT).exists():
            for store in folder.glob("*/store"):
                while _mounts(store):
                    _call("umount", "-l", str(store))
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _mounts(path: Path) -> int:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sum(line.split()[1] == str(path) for line in lines)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
