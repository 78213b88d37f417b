"""What all tests share: places of their own for everything tlxgen writes, and compilers that outlive one test."""

from __future__ import annotations

import os

# Small products on few cores: several threads each would wait for one another. Read when numpy and torch are imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch's compiler is to compile in this process: up to torch 2.13 its own are forked from one that uses CUDA, and there
# Triton 3.7 and newer, which ask the driver themselves, see no GPU (pytorch/pytorch#184643). By the environment, since
# what is set in `torch._inductor.config` holds for one thread, and autograd compiles backward graphs in another.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tlxgen import paths
from tlxgen.devices import Gpu, target
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child

# How long an example takes says more of what else the machine does than of the example.
settings.register_profile("tlxgen", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tlxgen")

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))  # the module `jobs` must have one name in parents and children


@pytest.fixture(scope="session", autouse=True)
def _own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Emitted kernels stay out of the user's cache; Triton's own cache is shared, since it is keyed by content."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg-cache")))
        yield


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a database of its own."""
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "tuned.db"))


@pytest.fixture
def no_shipped_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row but the test's own."""
    monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path / "nothing-shipped")


@pytest.fixture(scope="session")
def compile_pool() -> Iterator[CompilePool]:
    """Compilers for sm_90a; one where pytest-xdist fills the cores already."""
    workers = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
    with CompilePool((9, 0), workers, timeout=120.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def compiler() -> Iterator[Child]:
    """A process for compilations that are waited for: a compiler that aborts fails one test."""
    child = Child({"PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""})
    yield child
    child.kill()


@pytest.fixture
def h200() -> Gpu:
    return target("h200")
