"""Triton and pydantic look for plugins wherever there may be any, and are spared it where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tlxgen import ops
from tlxgen.startup import plugins

ROOT = Path(__file__).parents[2]
PYDANTIC, TRITON = "PYDANTIC_DISABLE_PLUGINS", "TRITON_BACKENDS_IN_TREE"

IN_TREE = "[triton.backends]\namd = triton.backends.amd\nnvidia = triton.backends.nvidia\n"
SCRIPTS = "[console_scripts]\npydantic-of-mine = mine.pydantic:main\n"

#: Tells of each model that is made.
LOUD = """
SEEN = []

class Plugin:
    def new_schema_validator(self, schema, schema_type, schema_type_path, *_):
        SEEN.append(schema_type_path.name)
        return None, None, None

plugin = Plugin()
"""
BACKEND = """
from triton.backends.{module} import {base}

class Elsewhere({base}):
    pass

Elsewhere.__abstractmethods__ = frozenset()
"""
#: Whoever looks fails.
NOBODY_LOOKS = """
import importlib.metadata

def entry_points(**_):
    raise AssertionError("somebody looks")

importlib.metadata.entry_points = entry_points
"""


def distribution(folder: Path, entry_points: str, name: str = "mine-1.0.dist-info") -> Path:
    """Installs one; returns its entry points."""
    info = folder / name
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return info / "entry_points.txt"


def of_a_new_process(code: str, *folders: Path) -> Any:
    """What it prints, with these folders among those that are searched."""
    path = os.pathsep.join(map(str, [ROOT, *folders]))
    environment = {name: value for name, value in os.environ.items() if name not in {PYDANTIC, TRITON}}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def needless(*folders: Path) -> frozenset[str]:
    """Variables of the searches through these folders that would find nothing."""
    return plugins._would_find_nothing(tuple(plugins._place(str(folder)) for folder in folders))


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries are still to look, and there is nothing to find."""
    monkeypatch.setattr(plugins, "_to_come", lambda: [PYDANTIC, TRITON])
    monkeypatch.setattr(plugins, "_needless", lambda: frozenset({PYDANTIC, TRITON}))
    monkeypatch.setattr(plugins, "_alone", lambda: True)
    for name in (PYDANTIC, TRITON):
        monkeypatch.delenv(name, raising=False)


def values() -> tuple[str | None, str | None]:
    return os.environ.get(PYDANTIC), os.environ.get(TRITON)


class TestVariables:
    def test_are_set_inside_and_gone_afterwards(self, nothing_there: None) -> None:
        def fail() -> None:
            with plugins.spared(), plugins.spared():
                assert values() == ("__all__", "1")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert values() == (None, None)

    @pytest.mark.parametrize("value", ["", "0", "1", "loud"])
    def test_of_the_users_own_stay(self, value: str, nothing_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PYDANTIC, value)
        with plugins.spared():
            assert values() == (value, "1")
        assert values() == (value, None)

    def test_are_left_alone_where_both_have_looked(self, nothing_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> frozenset[str]:
            raise AssertionError("nothing to spare")

        monkeypatch.setattr(plugins, "_to_come", list)
        monkeypatch.setattr(plugins, "_needless", fail)
        with plugins.spared():
            assert values() == (None, None)

    def test_are_not_set_beside_other_threads(self) -> None:
        """They might read the environment, or start a process."""
        found = of_a_new_process("""
import json, os, threading
from tlxgen.startup import plugins
last = threading.Event()
threading.Thread(target=last.wait, args=(10,)).start()
def is_set():
    with plugins.spared():
        return [name in os.environ for name in plugins._VALUES]
beside = is_set()
last.set()
threading.enumerate()[-1].join()
print(json.dumps([beside, is_set()]))
""")
        assert found == [[False, False], [True, True]]

    def test_are_not_set_while_torch_is_imported(self) -> None:
        """Which takes seconds, and looks for plugins of its own."""
        found = of_a_new_process("""
import importlib.abc, json, os, sys
from tlxgen.startup import plugins
found = {}
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        found.setdefault(name, any(variable in os.environ for variable in plugins._VALUES))
sys.meta_path.insert(0, Watch())
import tlxgen
tlxgen.functional
print(json.dumps([found["torch"], found["torch.autograd"], found["pydantic"]]))
""")
        assert found == [False, False, True]


class TestPydantic:
    OURS_AND_MINE = """
import json, sys
import tlxgen
tlxgen.Config
{between}
from pydantic import BaseModel
class Mine(BaseModel):
    x: int
Mine(x=1)
seen = sys.modules["loud"].SEEN if "loud" in sys.modules else None
config = tlxgen.Config(template="t", params={{"b": 1, "a": 2}})
print(json.dumps([seen, config.short]))
"""

    @pytest.fixture
    def loud(self, tmp_path: Path) -> Path:
        folder = tmp_path / "loud"
        distribution(folder, "[pydantic]\nloud = loud:plugin\n")
        (folder / "loud.py").write_text(LOUD)
        return folder

    def test_does_not_look_for_our_models_where_there_is_no_plugin(self) -> None:
        code = f"{NOBODY_LOOKS}\nimport json, os, tlxgen\ntlxgen.Config\nprint(json.dumps({PYDANTIC!r} in os.environ))"
        assert of_a_new_process(code) is False

    def test_does_not_look_for_problems_of_any_operator_either(self) -> None:
        made = (
            "tlxgen.get_kernel; from tlxgen import ops; problems = [ops.get(name).problem_type for name in ops.NAMES]"
        )
        code = f"{NOBODY_LOOKS}\nimport json, os, tlxgen\n{made}\nprint(json.dumps(len(problems)))"
        assert of_a_new_process(code) == len(ops.NAMES)

    def test_loads_a_plugin_for_our_models_and_the_users(self, loud: Path) -> None:
        seen, short = of_a_new_process(self.OURS_AND_MINE.format(between=""), loud)
        assert {"Config", "Mine"} <= {name.rsplit(".")[-1] for name in seen}
        assert short == "t a=2 b=1"

    def test_looks_for_the_users_models_all_the_same(self, loud: Path) -> None:
        """One that comes too late for ours is found."""
        seen, short = of_a_new_process(self.OURS_AND_MINE.format(between=f"sys.path.append({str(loud)!r})"))
        assert [name.rsplit(".")[-1] for name in seen] == ["Mine"]
        assert short == "t a=2 b=1"

    def test_has_looked_once_a_model_of_the_users_was_made(self) -> None:
        code = """
import json
from pydantic import BaseModel
from tlxgen.startup import plugins
before = list(plugins._to_come())
class Mine(BaseModel):
    x: int
print(json.dumps([before, list(plugins._to_come())]))
"""
        assert of_a_new_process(code) == [[PYDANTIC, TRITON], [TRITON]]


class TestTriton:
    IMPORT = """
import json
from tlxgen.startup import plugins
with plugins.spared():
    import triton.backends
found = triton.backends.backends
print(json.dumps({name: [found[name].compiler.__module__, found[name].driver.__module__] for name in sorted(found)}))
"""

    @pytest.fixture(autouse=True)
    def _triton(self) -> None:
        pytest.importorskip("triton")

    def test_finds_the_same_whether_it_looks_or_not(self) -> None:
        spared = of_a_new_process(NOBODY_LOOKS + self.IMPORT)
        assert spared == of_a_new_process(self.IMPORT.replace("with plugins.spared():", "if True:"))
        assert "nvidia" in spared

    def test_finds_a_backend_from_elsewhere(self, tmp_path: Path) -> None:
        distribution(tmp_path, "[triton.backends]\nelsewhere = elsewhere\n")
        (tmp_path / "elsewhere").mkdir()
        for module, base in (("compiler", "BaseBackend"), ("driver", "DriverBase")):
            (tmp_path / "elsewhere" / f"{module}.py").write_text(BACKEND.format(module=module, base=base))
        found = of_a_new_process(self.IMPORT, tmp_path)
        assert found["elsewhere"] == ["elsewhere.compiler", "elsewhere.driver"]
        assert {"amd", "nvidia"} < set(found)


class TestWhetherThereIsAnything:
    def test_scripts_with_such_names_are_no_plugins(self, tmp_path: Path) -> None:
        distribution(tmp_path, SCRIPTS)
        assert needless(tmp_path) == {PYDANTIC}

    @pytest.mark.parametrize("name", ["mine-1.0.dist-info", "mine.egg-info", "MINE-1.0.DIST-INFO"])
    def test_a_plugin_is_found_however_it_was_installed(self, name: str, tmp_path: Path) -> None:
        distribution(tmp_path, "[pydantic]\nloud = loud:plugin\n", name)
        assert needless(tmp_path) == set()

    def test_a_plugin_in_an_egg_is_found(self, tmp_path: Path) -> None:
        distribution(tmp_path / "mine-1.0.egg", "[pydantic]\nloud = loud:plugin\n", "EGG-INFO")
        assert needless(tmp_path / "mine-1.0.egg") == set()

    def test_a_plugin_far_down_in_a_file_is_found(self, tmp_path: Path) -> None:
        scripts = "".join(f"script{i} = mine:main\n" for i in range(5000))
        distribution(tmp_path, f"[console_scripts]\n{scripts}[pydantic]\nloud = loud:plugin\n")
        assert needless(tmp_path) == set()

    @pytest.mark.parametrize(
        "entry_points",
        [
            "",  # Triton would find none at all
            IN_TREE.replace("nvidia = triton.backends.nvidia\n", ""),
            IN_TREE.replace("= triton.backends.nvidia", "= elsewhere.nvidia"),
            IN_TREE.replace("nvidia =", "cuda ="),
            IN_TREE + "elsewhere = elsewhere\n",
        ],
    )
    def test_backends_must_be_those_in_tree_and_no_others(
        self, entry_points: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plugins, "_in_tree", lambda: {"amd", "nvidia"})
        file = distribution(tmp_path, entry_points)
        assert needless(tmp_path) == {PYDANTIC}
        plugins._would_find_nothing.cache_clear()
        file.write_text(IN_TREE)
        assert needless(tmp_path) == {PYDANTIC, TRITON}

    def test_folders_without_distributions_or_without_files_hold_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "a.dist-info").mkdir()
        (tmp_path / "b.dist-info" / "entry_points.txt").mkdir(parents=True)
        (tmp_path / "c.egg-info").write_text("as distutils did")
        assert needless(tmp_path, tmp_path / "nowhere") == {PYDANTIC}

    def test_what_is_installed_meanwhile_is_found(self, tmp_path: Path) -> None:
        assert PYDANTIC in needless(tmp_path)
        distribution(tmp_path, "[pydantic]\nloud = loud:plugin\n")
        assert PYDANTIC not in needless(tmp_path)


class TestWhatCannotBeTold:
    """Then both look for themselves."""

    @pytest.fixture
    def searched(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], frozenset[str]]:
        def also(path: Any) -> frozenset[str]:
            monkeypatch.setattr(sys, "path", [*sys.path, path])
            return plugins._needless()

        return also

    def test_a_plain_folder_can(self, searched: Callable[[Any], frozenset[str]], tmp_path: Path) -> None:
        assert PYDANTIC in searched(str(tmp_path))

    def test_a_zip(self, searched: Callable[[Any], frozenset[str]], tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "mine.zip", "w") as file:
            file.writestr("mine-1.0.dist-info/entry_points.txt", "[pydantic]\nloud = loud:plugin\n")
        assert searched(str(tmp_path / "mine.zip")) == set()

    @pytest.mark.parametrize("path", ["\0", None, 3, b"mine"])
    def test_no_path_at_all(self, path: Any, searched: Callable[[Any], frozenset[str]]) -> None:
        assert searched(path) == set()

    def test_a_file_that_cannot_be_parsed(self, searched: Callable[[Any], frozenset[str]], tmp_path: Path) -> None:
        distribution(tmp_path, "").write_bytes(b"[pydantic]\n\xff\xfe = \xff\n")
        assert searched(str(tmp_path)) == set()

    def test_a_finder_that_knows_other_distributions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Finder:
            def find_distributions(self, _context: Any) -> list[Any]:
                return []

        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
        assert plugins._needless() == set()
