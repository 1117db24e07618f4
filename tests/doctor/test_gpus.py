"""NVML's answers as nvidia-ml-py gives them, and what becomes of those that a driver does not have."""

import sys
import types

import pytest

from overlapkit.doctor.gpus import Gpu, Nvml, as_sysfs, slowdowns
from overlapkit.doctor.machine import Unreadable


class NVMLError(Exception):
    pass


class Struct(types.SimpleNamespace):
    pass


def binding(**changes):
    """A module that answers as pynvml does for two GPUs, the second of which knows little."""

    def only_first(answer):
        def ask(handle, *more):
            if handle != 0:
                raise NVMLError("Not Supported")
            return answer(*more) if callable(answer) else answer

        return ask

    def link_state(handle, link):
        if handle != 0 or link >= 4:
            raise NVMLError("Invalid Argument")
        return link != 2

    answers = {
        "NVMLError": NVMLError,
        "NVML_NVLINK_MAX_LINKS": 18,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_P2P_CAPS_INDEX_READ": (0,),  # as the package has it: a comma too many
        "NVML_P2P_STATUS_OK": 0,
        "NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED": 1,
        "NVML_P2P_STATUS_GPU_NOT_SUPPORTED": 2,
        "NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED": 3,
        "NVML_P2P_STATUS_DISABLED_BY_REGKEY": 4,
        "NVML_P2P_STATUS_UNKNOWN": 6,
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": only_first("NVIDIA H100"),
        "nvmlDeviceGetPciInfo": lambda handle: Struct(busId=f"00000000:{0x1B + handle:02X}:00.0"),
        "nvmlDeviceGetMemoryInfo": only_first(Struct(total=80 << 30, used=1 << 30)),
        "nvmlDeviceGetRemappedRows": only_first((0, 1, 1, 0)),
        "nvmlDeviceGetCurrentClocksEventReasons": only_first(0x01 | 0x40 | 0x08),
        "nvmlDeviceGetPerformanceState": only_first(0),
        "nvmlDeviceGetComputeRunningProcesses": only_first([object(), object()]),
        "nvmlDeviceGetMigMode": only_first([0, 0]),
        "nvmlDeviceGetPersistenceMode": only_first(1),
        "nvmlDeviceGetTotalEccErrors": only_first(
            lambda kind, counter: 5 if (kind, counter) == (1, 0) else 99
        ),
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetNvLinkErrorCounter": only_first(lambda link, kind: 3 if (link, kind) == (3, 1) else 0),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: (
            {(0, 1): 1, (1, 0): 6}[one, other] if index == 0 else 9
        ),
    }
    return types.SimpleNamespace(**{**answers, **changes})


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", binding())
    return Nvml()


def test_what_nvml_says(nvml):
    first, second = nvml.read()
    assert (nvml.driver, nvml.cuda) == ("580.95.05", (13, 1))
    assert first == Gpu(
        "0000:1b:00.0",
        "NVIDIA H100",
        memory=80 << 30,
        used=1 << 30,
        others=2,
        uncorrected=5,
        remap_pending=True,
        remap_failed=False,
        slow=("hardware slowdown", "too hot"),
        idle=False,
        persistent=True,
        mig=False,
        links=(True, True, False, True),
        link_errors=3,
    )
    assert second == Gpu("0000:1c:00.0", "GPU", links=())
    assert nvml.peers(0, 1) == "the chipset does not support it"
    assert nvml.peers(1, 0) is None


def test_a_binding_that_is_older_than_a_question(monkeypatch):
    old = binding()
    del old.nvmlDeviceGetRemappedRows, old.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.setitem(sys.modules, "pynvml", old)
    first, _ = Nvml().read()
    assert (first.remap_pending, first.slow, first.uncorrected) == (None, None, 5)


def test_no_driver_and_no_package(monkeypatch):
    def fails():
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", binding(nvmlInit=fails))
    with pytest.raises(Unreadable, match="NVML: NVML Shared Library Not Found"):
        Nvml()
    monkeypatch.setattr("overlapkit.extras.import_module", lambda name: (_ for _ in ()).throw(gone(name)))
    with pytest.raises(Unreadable, match=r"pynvml is not installed: pip install 'overlapkit\[gpu\]'"):
        Nvml()


def gone(name):
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_words_of_the_driver():
    assert as_sysfs("00000000:1B:00.0") == "0000:1b:00.0"
    assert as_sysfs("00010000:C1:00.0\0") == "0000:c1:00.0"
    assert as_sysfs("nonsense") == "nonsense"
    assert slowdowns(0x05) == ()  # it rests, and keeps to its power limit
    assert slowdowns(0x80) == ("power brake",)
