"""`remap doctor`: what it says about a driver that is missing, old, emulated or working, and what to do about each."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from remap import _core
from remap.cli import doctor, doctor_cuda, doctor_link, doctor_vllm
from remap.cli.check import Check
from remap.cli.doctor_cuda import DriverAnswers
from remap.cli.doctor_link import MeasuredLink
from remap.cli.main import app
from remap.errors import DriverError, Error, InvalidArgument, LimitExceeded, OutOfMemory

MIB, GIB = 1 << 20, 1 << 30
VMM = {"vmm": True, "posix_fd": True, "fabric": False, "granularity": 2 * MIB, "recommended_granularity": 2 * MIB}
MEMORY = {"total_bytes": 80 * GIB, "free_bytes": 79 * GIB, "coherent": False, "integrated": False}
HOST = {"gpu_direct_rdma": True, "read_only_host_register": True, "pcie": (0, 0x41, 0)}
DEVICE = {"index": 0, "name": "a device", "compute_capability": (9, 0), **VMM, **MEMORY, **HOST}
BUDGET = {"host_budget_bytes": 200 * GIB, "host_limited_by": "machine"}
PROBE = {"library": "libcuda.so.1", "driver_version": 13000, "emulated": False, **BUDGET, "devices": [DEVICE]}
SPEED = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
SLOT = {**SPEED, "current_link_width": "16", "max_link_width": "16"}
GOOD_LINK = MeasuredLink(32 * MIB, 55e9, 54e9, True)


def seen(device: Any = None, probe: Any = None, **changes: Any) -> DriverAnswers:
    """A machine with one good device, changed as told."""
    whole = {**PROBE, "devices": [{**DEVICE, **(device or {})}], **(probe or {})}
    return DriverAnswers(**{"probe": whole, "links": {0: GOOD_LINK}, "slots": {0: SLOT}, **changes})


def by_subject(state: DriverAnswers) -> dict[str, Check]:
    found = list(doctor_cuda.checks(state))
    assert len({check.what for check in found}) == len(found)
    # What is not as it should be says what to do about it.
    assert all(check.fix for check in found if check.level != "ok"), found
    return {check.what: check for check in found}


def test_a_good_machine_has_nothing_to_fix() -> None:
    found = by_subject(seen(environment={"REMAP_DEVICE": "cuda:0"}, kernel_module="NVRM version: 580.65.06"))
    assert {check.level for check in found.values()} == {"ok"}
    assert found["cuda driver"].found == "libcuda.so.1, CUDA 13.0, NVRM version: 580.65.06"
    assert found["cuda:0"].found == "a device, compute capability 9.0, 80 GiB, 79 GiB free"
    assert found["cuda:0 pages"].found == "multiples of 2 MiB, 2 MiB recommended"
    assert found["cuda:0 sharing"].found.startswith("pages can be exported as posix_fd; NICs may register")
    assert found["cuda:0 link"].found == (
        "to the device 55.0 GB/s, back 54.0 GB/s (32 MiB, page-locked); PCIe at 32.0 GT/s x16 carries 63.0 GB/s"
    )
    assert found["page-locked memory"].found.startswith("200 GiB")
    assert found["device of a session"].found == "cuda:0 (REMAP_DEVICE)"


NONSENSE = ("gpu", "cuda:", "cuda:x", "cuda:-1", "CPU")
MISSING = DriverError("cannot load libcuda.so.1: no such file", library="libcuda.so.1")


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        (DriverAnswers(error=MISSING), "for device='cuda' only: install NVIDIA's driver"),
        (DriverAnswers(error=MISSING, device_files=True), "docker run --gpus all"),
        (DriverAnswers(error=MISSING, environment={"REMAP_LIBCUDA": "/a/b.so"}), "REMAP_LIBCUDA=/a/b.so names"),
        (DriverAnswers(error=DriverError("cuInit: no device", call="cuInit", code=100)), "nvidia-smi"),
        (
            DriverAnswers(error=DriverError("too old", library="x.so", found=11020, needed=12000)),
            "update NVIDIA's driver",
        ),
    ],
)
def test_no_driver_is_a_note_with_the_way_out(state: DriverAnswers, advice: str) -> None:
    found = by_subject(state)
    assert set(found) == {"cuda driver", SESSION}
    assert (found["cuda driver"].level, found["cuda driver"].found) == ("note", str(state.error))
    assert advice in found["cuda driver"].fix
    assert found[SESSION] == Check("ok", SESSION, "cpu (REMAP_DEVICE is not set)")


SET_BUDGET = {"host_budget_bytes": 8 * GIB, "host_limited_by": "REMAP_HOST_BUDGET"}
EMULATED = {"emulated": True, "library": "/x/libremap_emulated_cuda.so"}
WRONG_SETTING = InvalidArgument("REMAP_HOST_BUDGET must be a size", name="REMAP_HOST_BUDGET", value="lots")
SESSION = "device of a session"


def asked(device: str) -> Mapping[str, str]:
    return {"REMAP_DEVICE": device}


# (what the machine is like, of what, level, pattern of what was found, pattern of what to do about it)
NO_VMM = {"device": {"vmm": False}, "links": {}}
CUDA0 = {"REMAP_DEVICE": "cuda:0"}
FULL = seen({"free_bytes": 0}, links={0: OutOfMemory("device full")})  # another process has the device to itself
GH200 = seen(environment={"REMAP_DEVICE": "sim:GH200-96GB"})

# (what the machine is like, of what, level, pattern of what was found, pattern of what to do about it)
JUDGED: list[tuple[DriverAnswers, str, str, str, str]] = [
    (DriverAnswers(error=MISSING, environment=asked("cuda")), "cuda driver", "bad", "", ""),
    (DriverAnswers(error=MISSING, environment=asked("cuda")), SESSION, "bad", "^REMAP_DEVICE=cuda, .* are: none$", ""),
    (DriverAnswers(error=WRONG_SETTING), "cuda settings", "bad", "^REMAP_HOST_BUDGET must be a size$", ""),
    # A device without virtual memory management is not usable, which is bad only where it was asked for.
    (seen(**NO_VMM), "cuda:0 virtual memory", "note", "", ""),
    (seen(**NO_VMM), SESSION, "ok", "", "^$"),
    (seen(**NO_VMM, environment=CUDA0), "cuda:0 virtual memory", "bad", "", ""),
    (seen(**NO_VMM, environment=CUDA0), SESSION, "bad", "^REMAP_DEVICE=cuda:0, but usable devices are: none$", ""),
    (FULL, "cuda:0", "note", "", "compute mode"),
    (FULL, "cuda:0 link", "note", "", ""),
    (seen(probe={"devices": []}), "cuda devices", "note", "", "docker run --gpus all"),
    (seen(probe={"devices": []}, environment={"CUDA_VISIBLE_DEVICES": ""}), "cuda devices", "note", "", "='' hides"),
    (seen(probe=EMULATED), "cuda driver", "note", "order and bookkeeping, not speed", "unset REMAP_LIBCUDA"),
    (seen({"coherent": True}), "cuda:0 coherence", "ok", "registered all the same", ""),
    (seen(probe={"host_budget_bytes": 80 * GIB}), "page-locked memory", "ok", "", ""),
    (seen(probe={"host_budget_bytes": 80 * GIB - 1}), "page-locked memory", "note", "machine", "host_budget"),
    (seen(probe=SET_BUDGET), "page-locked memory", "note", "as REMAP_HOST_BUDGET says", "^raise REMAP_HOST_BUDGET$"),
    (seen({"integrated": True}), "cuda:0 memory", "note", "", ""),
    (seen({"recommended_granularity": 32 * MIB}), "cuda:0 pages", "ok", "", r"^Session\(page_bytes='32MiB'\) if"),
    *((seen(environment=asked(name)), SESSION, "bad", "", "^set it to cpu, cuda, or cuda:N$") for name in NONSENSE),
    (GH200, SESSION, "note", r"^sim:GH200-96GB \(REMAP_DEVICE\).*virtual", ""),
    (seen(environment=asked("cuda:1")), SESSION, "bad", "^REMAP_DEVICE=cuda:1, but usable devices are: cuda:0$", ""),
    # KvCached's report of re-pointing on Volta.
    *((seen({"compute_capability": at}), "cuda:0 re-pointing", "note", "", "") for at in ((7, 0), (7, 2))),
]


@pytest.mark.parametrize(("state", "subject", "level", "found", "fix"), JUDGED)
def test_what_is_judged_how(state: DriverAnswers, subject: str, level: str, found: str, fix: str) -> None:
    check = by_subject(state)[subject]
    assert check.level == level
    assert re.search(found, check.found) and re.search(fix, check.fix), check


def test_what_does_not_concern_a_machine_is_not_said() -> None:
    assert "cuda:0 pages" not in by_subject(seen({"vmm": False}, links={}))
    assert "cuda:0 coherence" not in by_subject(seen())
    for capability in ((6, 0), (7, 5)):
        assert "cuda:0 re-pointing" not in by_subject(seen({"compute_capability": capability}))
    assert "GB/s" not in by_subject(seen(probe=EMULATED))["cuda:0 link"].found, "an emulated driver has no speeds"
    coherent = by_subject(seen({"coherent": True}, links={0: MeasuredLink(32 * MIB, 300e9, 290e9, True)}))
    assert "PCIe" not in coherent["cuda:0 link"].found, "its slot is not its link"
    assert "spare" not in by_subject(seen(probe=SET_BUDGET))["page-locked memory"].found


@pytest.mark.parametrize(
    ("link", "slot", "level", "text"),
    [
        (MeasuredLink(MIB, 55e9, 54e9, True), {}, "ok", "55.0 GB/s"),
        (MeasuredLink(MIB, 25e9, 25e9, True), {**SLOT, "current_link_width": "8"}, "note", "32.0 GT/s x8 carries 31.5"),
        (
            MeasuredLink(MIB, 25e9, 25e9, True),
            {**SLOT, "current_link_speed": "16.0 GT/s PCIe"},
            "note",
            "16.0 GT/s x16",
        ),
        (MeasuredLink(MIB, 20e9, 55e9, True), SLOT, "note", "carries 63.0"),
        # A virtual machine's files may describe anything: a link that carried more than they allow is not theirs.
        (MeasuredLink(MIB, 55e9, 54e9, True), {**SLOT, "current_link_width": "1"}, "ok", "55.0 GB/s"),
        (MeasuredLink(MIB, 55e9, 54e9, True), {**SLOT, "current_link_speed": "Unknown"}, "ok", "55.0 GB/s"),
        (MeasuredLink(MIB, 55e9, 54e9, False), SLOT, "bad", "came back different"),
        (None, SLOT, "note", "not measured"),
        (OutOfMemory("device full"), SLOT, "note", "not measured: device full"),
        (LimitExceeded("host budget"), SLOT, "note", "not measured: host budget"),
        (DriverError("launch failed"), SLOT, "bad", "not measured: DriverError: launch failed"),
    ],
)
def test_the_link_is_judged_by_what_its_lanes_carry(link: Any, slot: dict[str, str], level: str, text: str) -> None:
    found = doctor_link.check_link("cuda:0 link", link, slot, emulated=False, blocked="bad")
    assert (found.level, text in found.found) == (level, True), found
    assert bool(found.fix) == (level != "ok")


def test_a_measurement_copies_checks_and_gives_everything_back_also_when_it_fails() -> None:
    backend = _core.make_fault_backend(_core.make_host_backend(MIB, MIB))
    link = doctor_link.measure_link(backend, nbytes=MIB, seconds=0.0)
    assert (link.bytes, link.equal) == (MIB, True) and min(link.to_device, link.to_host) > 0
    assert set(backend.usage().values()) == {0}
    # What gives back comes last; a driver that refuses that, too, leaves something, and nobody could do more.
    calls = backend.calls() - 8
    for nth in range(calls + 1):
        backend.arm_any(nth) if nth else backend.fail_async_copy(1)
        with pytest.raises(Error):
            doctor_link.measure_link(backend, nbytes=MIB, seconds=0.0)
        backend.disarm()
        assert set(backend.usage().values()) == {0}, nth


def test_rates_of_one_lane_and_a_slot_that_is_not_there() -> None:
    assert doctor_link.read_slot(0xFFFF, 0xFF, 0x1F) == {}
    rates = [round(doctor_link.lane_rate(f"{speed} GT/s PCIe") / 1e6) for speed in (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)]
    assert rates == [250, 500, 985, 1969, 3938, 7562]
    assert doctor_link.lane_rate("Unknown") == doctor_link.lane_rate("") == 0.0


def test_the_map_count_limit_against_the_machines_memory() -> None:
    memory = "MemTotal:       268435456 kB\nMemFree:  1 kB\n"  # 256 GiB
    small = doctor.mappings("65530", memory)
    assert (small.level, small.found) == ("note", "65530: host arenas up to about 63 GiB in 2 MiB pages")
    assert "vm.max_map_count=262144" in small.fix
    levels = [doctor.mappings(*given).level for given in (("262144", memory), ("65530", None), (None, memory))]
    assert levels == ["ok", "ok", "note"]


def test_memlock_huge_pages_and_torch_beside_a_gpu() -> None:
    endless = resource.RLIM_INFINITY
    assert doctor.memlock(endless, endless).found == "unlimited"
    assert doctor.memlock(8 * MIB, endless).found.startswith("8 MiB (at most unlimited)")
    assert doctor.huge_pages("always within_size [advise] never deny force").level == "ok"
    never = doctor.huge_pages("always within_size advise [never] deny force")
    assert (never.level, never.found, "echo advise" in never.fix) == ("note", "never", True)
    assert doctor.huge_pages(None).level == "note"
    assert doctor.torch_build("2.11.0+cu130", "13.0") == Check("ok", "torch", "2.11.0+cu130, built for CUDA 13.0")
    without = doctor.torch_build("2.13.0+cpu", None)
    assert (without.level, "build with CUDA" in without.fix) == ("note", True)


@pytest.mark.parametrize("library", ["/nonexistent/libcuda.so.1", "libm.so.6"], ids=["missing", "not CUDA"])
def test_without_a_driver_the_command_succeeds_and_explains(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMAP_DEVICE", raising=False)
    monkeypatch.setenv("REMAP_LIBCUDA", library)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert library in result.output.partition("note cuda driver: ")[2].partition("\n")[0]
    for said in (f"REMAP_LIBCUDA={library} names the library", "host arena: opened 16 MiB in 8 pages"):
        assert said in result.output
    monkeypatch.setenv("REMAP_DEVICE", "cuda:0")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1  # cuda was asked for
    report = json.loads(result.stdout)
    assert set(report) == {"remap", "ok", "checks", "cuda"} and report["ok"] is False
    assert {entry["what"] for entry in report["checks"] if entry["level"] == "bad"} == {"cuda driver", SESSION}
    assert report["cuda"]["probe"] is None and report["cuda"]["error"]
    assert report["cuda"]["environment"] == {"REMAP_DEVICE": "cuda:0", "REMAP_LIBCUDA": library}


def test_the_emulated_device_is_probed_measured_and_left_as_it_was(emulated, monkeypatch) -> None:
    monkeypatch.setenv("REMAP_LIBCUDA", emulated.path)
    monkeypatch.setenv("REMAP_DEVICE", "cuda:0")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    levels = {entry["what"]: entry["level"] for entry in report["checks"]}
    assert "bad" not in levels.values()
    assert levels["cuda driver"] == "note"
    assert levels["cuda:0"] == levels["cuda:0 pages"] == levels["cuda:0 link"] == levels["device of a session"] == "ok"
    (device,) = report["cuda"]["probe"]["devices"]
    assert (device["granularity"], device["total_bytes"], device["vmm"]) == (64 << 10, 1 << 30, True)
    assert report["cuda"]["links"]["0"]["equal"] is True
    assert emulated.calls("cuMemcpyHtoDAsync") >= 1
    assert emulated.pageable() == 0  # the copies were of page-locked memory


@pytest.mark.parametrize(
    ("entry", "code", "level"), [("cuMemCreate", 2, "note"), ("cuMemHostRegister", 2, "note"), ("cuMemMap", 1, "bad")]
)
def test_a_device_that_cannot_be_measured_says_why(emulated, monkeypatch, entry, code, level) -> None:
    monkeypatch.setenv("REMAP_LIBCUDA", emulated.path)
    monkeypatch.setenv("REMAP_DEVICE", "cuda:0")
    emulated.arm(entry, 1, code)
    state = doctor_cuda.look()
    assert state.probe is not None
    (link,) = (check for check in doctor_cuda.checks(state) if check.what == "cuda:0 link")
    assert link.level == level
    assert entry in link.found


@pytest.mark.parametrize("there", [(), ("torchcodec",), ("torchvision", "torchaudio", "torchcodec")])
def test_what_pypi_builds_for_cuda_is_named_beside_a_cpu_vllm(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...]
) -> None:
    monkeypatch.setattr(doctor_vllm.importlib.util, "find_spec", lambda name: object() if name in there else None)
    said = list(doctor_vllm._built_for_cuda())
    assert [(each.level, each.what) for each in said] == ([("note", ", ".join(there))] if there else [])
    assert all(each.fix.endswith("pip uninstall " + " ".join(there)) for each in said)
