"""What the first launch of a new process imports and looks up, where an old process made the same call."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.stub_launcher import Noting
from tlxgen import api, ops, paths
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import target
from tlxgen.problem import Problem
from tlxgen.runtime import call_checks, kernel, kernel_notes
from tlxgen.runtime.selection import select
from tlxgen.space.candidates import candidates
from tlxgen.startup import collector, notes

H200 = target("h200")
GEMM = ops.get("gemm")
ROOT = Path(__file__).parents[2]

#: The binary is compiled or found as ever; what would load and launch it does nothing.
FIRST_LAUNCH = """
import contextlib, json, sys, threading, warnings
import torch
warnings.simplefilter("ignore")
before = set(sys.modules)
import tlxgen
from tlxgen import devices
from tlxgen.runtime import kernel as runtime, plans

class Launcher:
    slim, indices = True, None
    def __init__(self, module, args, capability):
        from tlxgen.codegen.compile import compile_kernel
        global compiled
        compiled = compile_kernel(module, args, capability)
        self.lock = threading.Lock()
        self.dispatcher = lambda *_: None
    def __call__(self, *_):
        pass

vars(devices).update(detect=lambda _=None: devices.target("h200"))
vars(runtime).update(_current_device=lambda: 0); vars(runtime.call_checks).update(KIND="meta")
vars(plans).update(Launcher=Launcher, on_device=lambda _: contextlib.nullcontext(), is_capturing=lambda: False)
vars(plans).update(raw_stream=lambda _: 0, current_device=lambda: 0)
a = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
kernel = tlxgen.get_kernel("gemm", (1024, 1024, 1024))
kernel(a, a)
read, filed = sorted(compiled.asm), sorted(name.rpartition(".")[2] for name in compiled.metadata_group)
print(json.dumps([kernel.origin, kernel.config.id, sorted(set(sys.modules) - before), read, filed]))
"""

#: Modules and packages of ours that a first launch imports; a module is 0.2 to 2 ms of it.
MOST_OWN = 52


def first_launch() -> tuple[str, str, set[str], set[str], set[str]]:
    """Origin, config, imports, which of the binary's files were read, and which there are."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LAUNCH],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    origin, config, imported, read, filed = json.loads(done.stdout)
    return origin, config, set(imported), set(read), set(filed)


def problem(m: int = 1024) -> Problem:
    made = GEMM.problem((m, 1024, 1024))
    assert isinstance(made, Problem)
    return made


def record(config: Config, source_hash: str) -> TunedRecord:
    key = tuning_key(problem(), H200.key)
    return TunedRecord(
        key=key, config=config, origin="measured", source_hash=source_hash, time_us=5.0, protocol="graph-2"
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[Path]:
    """A user's cache in which nothing is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel.forget()
    yield tmp_path / "cache" / "tlxgen"
    kernel.forget()


@pytest.fixture
def tuned() -> Config:
    """A row that may be served."""
    config = candidates(problem(), H200)[3]
    with Store.open(read_only_ok=False) as store:
        store.put(record(config, emit(GEMM, problem(), config).code_hash))
    return config


@pytest.mark.slow
def test_the_second_process_imports_what_launches_and_nothing_that_finds_out(cache: Path, tuned: Config) -> None:
    """Each of those left out costs every first launch 2 to 60 ms: see "The first launch" in docs/runtime.md."""
    assert first_launch()[:2] == ("tuned", tuned.id)
    origin, config, imported, read, filed = first_launch()
    assert (origin, config) == ("tuned", tuned.id)
    assert filed - read == {"json", "llir"}  # of which the latter is larger than all others together
    packages = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert {name for name in packages if not name.startswith("_")} <= {
        *("tlxgen", "tlxgen_kernels", "torch", "triton", "platformdirs"),
        *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
    }
    needless = {
        *("space.search_space", "space.constraint", "codegen.rendering", "codegen.facts", "codegen.line_breaks"),
        *("db.validity", "db.nearest"),
        *("tuner", "simulator", "functional", "cli"),
    }
    assert imported.isdisjoint(f"tlxgen.{name}" for name in needless)
    own = {name for name in imported if name.startswith("tlxgen.")}
    assert len(own) <= MOST_OWN, " ".join(sorted(own))
    assert not {name for name in imported if name.startswith(("triton.experimental", "triton.compiler.code_generator"))}


def in_a_copy(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Templates or search spaces, for tests to change: changes are no younger than the import of what reads them."""
    patch.setattr(kernel_notes, "_IMPORTED", float("inf"))
    copy = folder / name
    shutil.copytree(getattr(paths, name), copy)
    patch.setattr(paths, name, copy)
    return copy


class TestServed:
    @pytest.fixture
    def remembered(self, cache: Path) -> Config:
        """A config whose kernel was launched before."""
        from tlxgen.codegen import loader

        config = candidates(problem(), H200)[0]
        source = emit(GEMM, problem(), config)
        loader.write(source)
        kernel_notes.remember(source, H200)
        return config

    def test_is_what_would_be_emitted(self, remembered: Config) -> None:
        found = kernel_notes.recall(problem(), remembered, H200)
        emitted = emit(GEMM, problem(), remembered)
        assert found == emitted
        assert found.code_hash == emitted.code_hash
        assert found.file_name == emitted.file_name

    def test_knows_nothing_of_other_problems_configs_and_gpus(self, remembered: Config) -> None:
        assert kernel_notes.recall(problem(2048), remembered, H200) is None
        assert kernel_notes.recall(problem(), candidates(problem(), H200)[1], H200) is None
        assert kernel_notes.recall(problem(), remembered, target("h100-pcie")) is None

    @pytest.mark.parametrize("name", ["TEMPLATES", "SEARCH_SPACES"])
    def test_knows_nothing_once_a_template_or_a_space_is_another(
        self, name: str, remembered: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = in_a_copy(name, tmp_path, monkeypatch)
        assert kernel_notes.recall(problem(), remembered, H200) is not None
        edited = next(path for path in sorted(copy.rglob("*")) if path.suffix in {".j2", ".yaml"})
        edited.write_text(edited.read_text() + "\n")
        kernel_notes.forget()
        assert kernel_notes.recall(problem(), remembered, H200) is None

    def test_knows_nothing_once_a_file_has_another_name(
        self, remembered: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = in_a_copy("TEMPLATES", tmp_path, monkeypatch)
        before = kernel_notes._everything(copy, paths.SEARCH_SPACES)
        assert before is not None
        kernel_notes.forget()
        macro = next((copy / "macros").glob("*.j2"))
        macro.rename(macro.with_name("another.j2"))
        assert kernel_notes._everything(copy, paths.SEARCH_SPACES) not in {None, before}

    def test_knows_nothing_of_code_that_changed_after_its_import(
        self, remembered: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert kernel_notes.recall(problem(), remembered, H200) is not None
        kernel_notes.forget()
        monkeypatch.setattr(kernel_notes, "_IMPORTED", 0.0)
        assert kernel_notes.recall(problem(), remembered, H200) is None

    def test_knows_nothing_where_a_file_cannot_be_read(
        self, remembered: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Editors leave links that lead nowhere beside what is being edited."""
        copy = in_a_copy("SEARCH_SPACES", tmp_path, monkeypatch)
        (copy / ".#gemm_vanilla.yaml").symlink_to("somebody@somewhere")
        assert kernel_notes.recall(problem(), remembered, H200) is None

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", "{}", '{"file": 3, "code_hash": 4}', '{"file": "../x"}', "\xff"]
    )
    def test_a_damaged_note_is_a_miss(self, content: str, remembered: Config, cache: Path) -> None:
        (note,) = (cache / "served").iterdir()
        note.write_text(content, encoding="latin-1")
        assert kernel_notes.recall(problem(), remembered, H200) is None

    def test_a_file_that_holds_something_else_is_a_miss(self, remembered: Config, cache: Path) -> None:
        (file,) = (cache / "kernels").iterdir()
        file.write_text(file.read_text().replace("128", "64", 1))
        assert kernel_notes.recall(problem(), remembered, H200) is None
        file.unlink()
        assert kernel_notes.recall(problem(), remembered, H200) is None

    def test_a_row_of_other_code_is_refused_all_the_same(self, remembered: Config) -> None:
        with Store.open(read_only_ok=False) as store:
            store.put(record(remembered, "0" * 32))
        choice = select(problem(), H200)
        assert choice.origin == "default"
        assert "emits other code" in choice.passed_over[0]

    def test_a_row_of_this_code_is_served(self, remembered: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        with Store.open(read_only_ok=False) as store:
            store.put(record(remembered, emit(GEMM, problem(), remembered).code_hash))
        monkeypatch.delitem(sys.modules, "tlxgen.db.validity", raising=False)
        assert select(problem(), H200).origin == "tuned"
        assert "tlxgen.db.validity" not in sys.modules


class TestNotes:
    def test_come_back_as_they_were(self, cache: Path) -> None:
        notes.remember("kind", ["a", "b"], {"x": [1, None]})
        assert notes.recall("kind", ["a", "b"]) == {"x": [1, None]}
        assert notes.recall("kind", ["ab"]) is None
        assert notes.recall("other", ["a", "b"]) is None

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
    def test_a_cache_that_cannot_be_written_says_nothing(self, cache: Path) -> None:
        cache.parent.mkdir()
        cache.parent.chmod(0o500)
        notes.remember("kind", ["a"], {})
        assert notes.recall("kind", ["a"]) is None

    def test_without_a_home_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(paths, "user_cache_dir", lambda: Path("~/.cache/tlxgen"))
        notes.remember("kind", ["a"], {})
        assert notes.recall("kind", ["a"]) is None
        assert list(tmp_path.iterdir()) == []

    def test_a_cache_that_cannot_be_says_nothing(self, cache: Path) -> None:
        cache.parent.write_text("a file where the directory should be")
        notes.remember("kind", ["a"], {})
        assert notes.recall("kind", ["a"]) is None


class TestPausedCollector:
    @staticmethod
    def import_some(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(count):
            monkeypatch.setitem(sys.modules, f"imported_meanwhile_{number}", ModuleType("imported_meanwhile"))

    def test_collects_nothing_inside_and_is_back_afterwards(self) -> None:
        def fail() -> None:
            with collector.paused(), collector.paused():
                assert not gc.isenabled()
                raise ZeroDivisionError

        assert gc.isenabled()
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled()

    def test_leaves_alone_who_has_none(self) -> None:
        gc.disable()
        try:
            with collector.paused():
                pass
            assert not gc.isenabled()
        finally:
            gc.enable()

    @pytest.mark.parametrize("imports", [0, 1, collector._MANY])
    def test_looks_at_nothing_when_imports_are_done(self, imports: int, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []

        def look(phase: str, about: dict[str, int]) -> None:
            looks.append(about["generation"])

        made: list[list[int]] = []
        gc.callbacks.append(look)
        try:
            with collector.paused():
                self.import_some(imports, monkeypatch)
                made += [[] for _ in range(100_000)]
            made += [[] for _ in range(10)]
        finally:
            gc.callbacks.remove(look)
        assert (looks == []) is (imports == collector._MANY)
        assert gc.get_freeze_count() == 0

    def test_leaves_frozen_what_the_user_froze(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gc.freeze()
        try:
            frozen = gc.get_freeze_count()
            with collector.paused():
                self.import_some(collector._MANY, monkeypatch)
            assert 0 < gc.get_freeze_count() <= frozen  # fewer by those that ended
        finally:
            gc.unfreeze()

    @pytest.mark.parametrize("longest", ["first", "second"])
    def test_is_back_when_two_threads_are_done(self, longest: str) -> None:
        inside, end = threading.Event(), threading.Event()

        def work() -> None:
            with collector.paused():
                inside.set()
                end.wait(10)

        thread = threading.Thread(target=work)
        with collector.paused():
            thread.start()
            inside.wait(10)
            if longest == "first":
                end.set()
                thread.join()
        end.set()
        thread.join()
        assert gc.isenabled()

    def test_is_back_in_a_child_of_another_thread(self) -> None:
        inside, end = threading.Event(), threading.Event()

        def work() -> None:
            with collector.paused():
                inside.set()
                end.wait(10)

        thread = threading.Thread(target=work)
        thread.start()
        inside.wait(10)
        child = os.fork()
        if not child:
            os._exit(not gc.isenabled())
        end.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0


def test_lengths_that_share_a_module_share_a_note(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files do not grow with what is served."""
    from tlxgen import devices
    from tlxgen.runtime import plans

    patches: dict[Any, dict[str, Any]] = {
        plans: {"Launcher": Noting, "on_device": lambda _: nullcontext(), "is_capturing": lambda: False},
        kernel: {"_current_device": lambda: 0},
        call_checks: {"KIND": "meta"},
        devices: {"detect": lambda _=None: H200},
    }
    for module, names in patches.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(plans, "raw_stream", lambda _: 0)
    monkeypatch.setattr(plans, "current_device", lambda: 0)
    for name in [name for name in sys.modules if name.startswith("tlxgen_kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    config = candidates(problem(), H200)[0]
    for m in range(1024, 1024 + 16 * 20, 16):
        api.get_kernel("gemm", problem(m), config=config)(**GEMM.inputs(problem(m), "meta", 0))
    assert len(list((cache / "served").iterdir())) == 1
    assert len(list((cache / "kernels").glob("*.py"))) == 1
