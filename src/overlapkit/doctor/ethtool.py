"""A network driver's own counters (pause frames are only there), as `ethtool -S` reads them. Needs no root.

The layout is that of linux/ethtool.h: ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS and ETHTOOL_GSTATS.
"""

import array
import contextlib
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_OF_STATS = 1  # ETH_SS_STATS
_NAME_BYTES = 32  # ETH_GSTRING_LEN
_MOST = 1 << 16  # counters; a driver has some thousands at most


def statistics(interface: str) -> dict[str, int]:
    """The counters of one interface by name; empty where the driver has none or does not answer."""
    if not sys.platform.startswith("linux"):
        return {}
    with contextlib.suppress(OSError, struct.error), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        asked = _ask(line, interface, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _OF_STATS, 0))
        there, count = struct.unpack_from("=QI", asked, 8)
        if not there or not 0 < count <= _MOST:
            return {}
        strings = struct.pack("=III", _GSTRINGS, _OF_STATS, count) + bytes(_NAME_BYTES * count)
        names = _ask(line, interface, strings)[12:]
        values = _ask(line, interface, struct.pack("=II", _GSTATS, count) + bytes(8 * count))[8:]
        return {
            names[at * _NAME_BYTES : (at + 1) * _NAME_BYTES].split(b"\0")[0].decode("ascii", "replace"): value
            for at, value in enumerate(struct.unpack(f"={count}Q", values))
        }
    return {}


def _ask(line: socket.socket, interface: str, question: bytes) -> bytes:
    import fcntl  # not everywhere

    buffer = array.array("B", question)
    request = struct.pack("16sP", interface.encode()[:15], buffer.buffer_info()[0]).ljust(40, b"\0")
    fcntl.ioctl(line.fileno(), _SIOCETHTOOL, request)
    return buffer.tobytes()
