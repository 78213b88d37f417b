"""`tlxgen doctor`: each defect of an installation is a finding with a remedy, and nothing makes it fail."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.support import stub_nvml
from tlxgen import toolchain
from tlxgen.cli import doctor
from tlxgen.cli.doctor import Finding
from tlxgen.db.store import Store
from tlxgen.errors import CacheError
from tlxgen.toolchain import Triton
from tlxgen.tuner import nvml


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    """The database's path; the file does not exist."""
    return tmp_path / "tuned.db"


def _fake_torch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: str | None,
    gpus: list[Any] | None = None,
    hip: str | None = None,
    version: str = "2.13.0",
) -> None:
    devices = gpus or []
    torch = SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            is_available=lambda: bool(devices),
            device_count=lambda: len(devices),
            get_device_properties=lambda index: devices[index],
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


def _gpu(name: str, sms: int, major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, multi_processor_count=sms, major=major, minor=minor)


def test_findings_cover_every_topic() -> None:
    findings = doctor.examine()
    topics = {finding.topic for finding in findings}
    assert topics >= {"python", "torch", "gpu", "driver", "triton", "ptxas", "cuobjdump", "nvdisasm", "ncu", "cache"}
    assert "c compiler" in topics
    assert not [finding for finding in findings if "cannot be examined" in finding.detail]
    assert all(finding.remedy for finding in findings if finding.status == "problem")
    assert all("\n" not in finding.detail + finding.remedy for finding in findings)


def test_failing_probe_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(doctor._PROBES, "ncu", broken)
    (finding,) = [finding for finding in doctor.examine() if finding.topic == "ncu"]
    assert (finding.status, finding.detail) == ("problem", "cannot be examined: two lines")


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_empty_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    stub_nvml.install(monkeypatch, driver=False)
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CC", raising=False)
    statuses = {finding.topic: finding for finding in doctor.examine()}
    assert statuses["driver"].status == "warning"
    assert statuses["ncu"].status == "warning"
    assert statuses["c compiler"].status == "problem"
    assert "apt-get install gcc" in statuses["c compiler"].remedy


def test_python_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    (finding,) = doctor._python()
    assert (finding.status, finding.remedy) == ("problem", "use Python 3.10 to 3.13")


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (torch,), (gpu,) = doctor._torch(), doctor._gpu()
    assert torch.status == "problem"
    assert torch.remedy.startswith("pip install 'tlxgen[torch]'")
    assert gpu.status == "warning"


def test_torch_without_cuda_is_a_warning_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(monkeypatch, cuda=None)
    stub_nvml.install(monkeypatch, driver=False)
    (torch,), (gpu,) = doctor._torch(), doctor._gpu()
    assert (torch.status, gpu.status) == ("warning", "warning")
    assert "predicted" in gpu.detail
    assert gpu.remedy == ""


def test_torch_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(monkeypatch, cuda=None, hip="6.2")
    (finding,) = doctor._torch()
    assert (finding.status, "ROCm" in finding.detail) == ("warning", True)


def test_gpu_that_only_the_driver_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_nvml.install(monkeypatch, nvmlDeviceGetCount=1)
    _fake_torch(monkeypatch, cuda="13.0")
    assert "CUDA_VISIBLE_DEVICES" in doctor._gpu()[0].remedy
    _fake_torch(monkeypatch, cuda=None)
    assert "install a CUDA build" in doctor._gpu()[0].remedy


def test_each_gpu_has_a_finding_and_only_hopper_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [_gpu("NVIDIA H200", 132, 9, 0), _gpu("NVIDIA A100", 108, 8, 0), _gpu("NVIDIA B200", 148, 10, 0)]
    _fake_torch(monkeypatch, cuda="13.0", gpus=gpus)
    hopper, ampere, blackwell = doctor._gpu()
    assert (hopper.status, hopper.detail) == ("ok", "0: NVIDIA H200, 132 SMs, capability 9.0")
    assert (ampere.status, blackwell.status) == ("warning", "warning")
    assert "not Hopper" in blackwell.detail


VERSION, CUDA = {"nvmlSystemGetDriverVersion": "570.86.15"}, {"nvmlSystemGetCudaDriverVersion": 12080}


@pytest.mark.parametrize(
    ("answers", "status", "detail"),
    [
        (VERSION | CUDA, "ok", "570.86.15, CUDA up to 12.8"),
        (VERSION, "ok", "570.86.15, CUDA up to unknown"),
        ({}, "ok", "unknown, CUDA up to unknown"),
        ({"driver": False}, "warning", "no NVIDIA driver, or it does not answer"),
        ({"nvmlInit": threading.Event().wait}, "warning", "no NVIDIA driver, or it does not answer"),
    ],
    ids=["all", "no CUDA version", "no versions", "no driver", "driver hangs"],
)
def test_driver(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], status: str, detail: str) -> None:
    stub_nvml.install(monkeypatch, **answers)
    monkeypatch.setattr(nvml, "_LIMIT_S", 0.2 if "nvmlInit" in answers else 20.0)
    (finding,) = doctor._driver()
    assert (finding.status, finding.detail) == (status, detail)


def _state(owner: str | None, *names: str, damaged: bool = False, tlx: bool = True) -> Triton:
    versions = {"fbtriton": "3.7.4", "triton": "3.7.1"}
    folder = Path("/site/triton")
    return Triton(folder, "3.7.4", owner, {name: versions[name] for name in names}, damaged=damaged, has_tlx_files=tlx)


@pytest.mark.parametrize(
    ("state", "status", "detail"),
    [
        (_state("fbtriton", "fbtriton"), "ok", "3.7.4 in /site/triton (fbtriton 3.7.4)"),
        (_state(None), "ok", "3.7.4 in /site/triton (not registered)"),
        (_state("fbtriton", "fbtriton", "triton"), "warning", "fbtriton was installed over upstream's"),
        (_state("triton", "fbtriton", "triton"), "problem", "triton 3.7.1 was installed over fbtriton"),
        (_state("triton", "triton", tlx=False), "problem", "is upstream's, which has no TLX"),
        (_state("fbtriton", "fbtriton", damaged=True), "problem", "some of fbtriton's files are gone"),
        (Triton(None, "", None, {}, damaged=False, has_tlx_files=False), "problem", "the package `triton` is missing"),
    ],
)
def test_triton(monkeypatch: pytest.MonkeyPatch, state: Triton, status: str, detail: str) -> None:
    monkeypatch.setattr(toolchain, "inspect", lambda: state)
    monkeypatch.setattr(toolchain, "import_error", lambda: "")
    finding = doctor._triton()[0]
    assert finding.status == status
    assert detail in finding.detail
    if status != "ok":
        assert finding.remedy == toolchain.remedy(state)
        assert ("pip uninstall -y triton" in finding.remedy) == ("triton" in state.distributions)


@pytest.mark.parametrize(
    ("torch", "triton", "threads", "status"),
    [
        ("2.11.0+cu130", "3.7.4", None, "warning"),
        ("2.13.0+cu130", "3.8.0", "8", "warning"),
        ("2.11.0+cu130", "3.7.4", "1", "ok"),
        ("2.14.0+cu130", "3.7.4", None, None),
        ("2.9.1+cu130", "3.5.1", None, None),
        ("2.11.0+cu130", "", None, None),
    ],
)
def test_torch_compile(
    monkeypatch: pytest.MonkeyPatch, torch: str, triton: str, threads: str | None, status: str | None
) -> None:
    monkeypatch.setattr(toolchain, "inspect", lambda: replace(_state("fbtriton", "fbtriton"), version=triton))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", threads)
    _fake_torch(monkeypatch, cuda="13.0", gpus=[_gpu("NVIDIA H200", 132, 9, 0)], version=torch)
    findings = doctor._graphs()
    assert [finding.status for finding in findings] == ([status] if status else [])
    if status == "warning":
        assert f"torch {torch} " in findings[0].detail
        assert f"triton {triton} " in findings[0].detail
        assert findings[0].remedy == "export TORCHINDUCTOR_COMPILE_THREADS=1"
    _fake_torch(monkeypatch, cuda="13.0", version=torch)
    assert doctor._graphs() == []
    _fake_torch(monkeypatch, cuda=None, hip="7.0", gpus=[_gpu("AMD Instinct MI300X", 304, 9, 4)], version=torch)
    assert doctor._graphs() == []
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor._graphs() == []


def test_tlx_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "import_error", lambda: "ImportError: GLIBC_2.99 not found")
    finding = doctor._tlx()
    assert finding.status == "problem"
    assert "GLIBC_2.99" in finding.detail


@pytest.fixture
def ptxas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path of the environment's ptxas; the file does not exist."""
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    toolchain.ptxas_version.cache_clear()
    yield tmp_path / "ptxas"
    toolchain.ptxas_version.cache_clear()


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, ptxas: Path) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(toolchain, "_inspected", lambda: _state("fbtriton", "fbtriton"))
    assert {finding.status for finding in doctor._cuda_tools()} == {"problem"}


def test_ptxas_that_cannot_be_executed(ptxas: Path) -> None:
    ptxas.write_text("not executable")
    finding = doctor._cuda_tool("ptxas", "")
    assert (finding.status, "does not run" in finding.detail) == ("problem", True)


def test_ptxas_of_the_environment_is_reported(ptxas: Path) -> None:
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.4'\n")
    ptxas.chmod(0o755)
    assert doctor._cuda_tool("ptxas", "").detail == f"13.1.4, {ptxas}"


def test_missing_cache_is_ok_and_is_not_created(own_cache: Path) -> None:
    (finding,) = doctor._cache()
    assert (finding.status, finding.detail) == ("ok", f"{own_cache} (made on first use)")
    assert not own_cache.exists()


def test_cache_in_a_missing_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "mistyped/tuned.db"))
    (finding,) = doctor._cache()
    assert (finding.status, "does not exist" in finding.detail) == ("warning", True)
    assert "TLXGEN_CACHE" in finding.remedy


def _store(*, writable: bool = True, location: str = "tuned.db") -> Any:
    """A database with three rows in a given state."""
    return nullcontext(SimpleNamespace(writable=writable, location=location, records=lambda: [None] * 3))


@pytest.mark.parametrize(
    ("store", "status", "detail"),
    [
        (_store(), "ok", "3 tuned rows"),
        (_store(writable=False), "warning", "3 tuned rows, cannot be written"),
        (_store(writable=False, location=":memory:"), "problem", "cannot be read"),
        (CacheError("written by a newer tlxgen"), "problem", "cannot be opened: written by a newer tlxgen"),
    ],
)
def test_cache(monkeypatch: pytest.MonkeyPatch, own_cache: Path, store: Any, status: str, detail: str) -> None:
    def opened(_: Path) -> Any:
        if isinstance(store, CacheError):
            raise store
        return store

    Store.open(own_cache).close()
    monkeypatch.setattr("tlxgen.db.store.Store.open", opened)
    (finding,) = doctor._cache()
    assert finding.status == status
    assert detail in finding.detail
    assert bool(finding.remedy) == (status != "ok")


@pytest.mark.parametrize("content", [b"this is no database, nor was it ever one" * 50, b"\x00" * 4096])
def test_cache_file_that_is_no_database_is_left_alone(own_cache: Path, content: bytes) -> None:
    own_cache.write_bytes(content)
    (finding,) = doctor._cache()
    assert finding.status == "problem"
    assert "not a database" in finding.detail
    assert own_cache.read_bytes() == content
    assert list(own_cache.parent.iterdir()) == [own_cache]


def test_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "plotly")
    (finding,) = doctor._optional()
    assert finding.status == "ok"
    assert "plotly" in finding.detail
    assert finding.remedy == "pip install 'tlxgen[plot]'"


def test_json_is_one_line_and_says_whether_all_is_well() -> None:
    good = Finding("python", "ok", "3.12")
    bad = Finding("triton", "problem", "upstream's", "pip uninstall -y triton")
    assert json.loads(doctor.to_json([good])) == {
        "ok": True,
        "findings": [{"topic": "python", "status": "ok", "detail": "3.12", "remedy": ""}],
    }
    text = doctor.to_json([good, bad])
    assert "\n" not in text
    assert json.loads(text)["ok"] is False


def test_report_does_not_break_brackets_and_long_commands() -> None:
    command = "pip install 'tlxgen[torch]' && " + "x" * 150
    stream = io.StringIO()
    doctor.report([Finding("torch", "problem", "no [torch] here", command)], Console(file=stream, width=60))
    assert "no [torch] here" in stream.getvalue()
    assert f"torch: {command}" in stream.getvalue()


def test_empty_environment(tmp_path: Path) -> None:
    code = "from tlxgen.cli import doctor; print(doctor.to_json(doctor.examine()))"
    root = Path(__file__).parents[2]
    variables = {"PYTHONPATH": str(root), "TLXGEN_CACHE": str(tmp_path / "tuned.db")}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.splitlines()[-1])["findings"]
