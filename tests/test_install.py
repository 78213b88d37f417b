"""One `triton`, fbtriton's, whatever was installed in which order; and what travels in the distributions.

Small distributions stand for the real ones: they write the same paths, and installers treat them alike.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlxgen import install, toolchain
from tlxgen.errors import ToolchainError

ROOT = Path(__file__).parents[1]
FB, UP = "3.7.4", "3.7.1"

_SHARED = ("triton/language/__init__.py", "triton/language/extra/__init__.py", "triton/backends/nvidia/bin/ptxas")
_FBTRITON = {
    "triton/__init__.py": f"'''isort:skip_file'''\n__version__ = '{FB}+fb'\n",
    "triton/_C/libtriton.so": "the compiler with TLX",
    "triton/language/extra/tlx/__init__.py": "",
    **dict.fromkeys(_SHARED, ""),
}
_UPSTREAM = {
    "triton/__init__.py": f"__version__ = '{UP}'\n",
    "triton/_C/libtriton.so": "the compiler",
    "triton/only_upstream.py": "",
    **dict.fromkeys(_SHARED, ""),
}
DISTRIBUTIONS = {"fbtriton": (FB, _FBTRITON), "triton": (UP, _UPSTREAM)}


def _record(files: dict[str, str]) -> str:
    def line(path: str, text: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(text)}"

    return "\n".join([line(path, text) for path, text in files.items()]) + "\n"


def _with_metadata(name: str) -> dict[str, str]:
    version, files = DISTRIBUTIONS[name]
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return files | {f"{info}/RECORD": _record(files) + f"{info}/RECORD,,\n"}


class Site:
    """A folder of installed packages, treated as pip treats one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str) -> None:
        for path, text in _with_metadata(name).items():
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    def uninstall(self, name: str) -> None:
        for path in _with_metadata(name):
            (self.folder / path).unlink(missing_ok=True)
        shutil.rmtree(self.folder / f"{name}-{DISTRIBUTIONS[name][0]}.dist-info")

    def apply(self, commands: list[list[str]]) -> None:
        for command, *arguments in commands:
            names = [argument.split("==")[0] for argument in arguments if not argument.startswith("-")]
            for name in names:
                self.uninstall(name) if command == "uninstall" else self.install(name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site folder, the only place where distributions and `triton` are looked for."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(toolchain, "fbtriton_requirement", lambda: f"fbtriton=={FB}")
    monkeypatch.setattr(install, "fbtriton_requirement", lambda: f"fbtriton=={FB}")
    # find_spec answers from sys.modules for a module that was imported already.
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    toolchain.clear_caches()
    yield Site(tmp_path)
    toolchain.clear_caches()


def _healthy() -> toolchain.Triton:
    state = toolchain.inspect()
    assert state.has_tlx
    assert state.distributions == {"fbtriton": FB}
    assert install.steps(state) == []
    return state


def test_fbtriton_alone_needs_nothing(site: Site) -> None:
    site.install("fbtriton")
    state = _healthy()
    assert (state.owner, state.version) == ("fbtriton", FB)
    assert toolchain.explain(state) == ""
    toolchain.require_tlx()


def test_upstream_installed_over_fbtriton_is_named_and_replaced(site: Site) -> None:
    site.install("fbtriton")
    site.install("triton")
    state = toolchain.inspect()
    assert state.has_tlx_files, "TLX's folder survives, and proves nothing"
    assert not state.has_tlx
    assert state.owner == "triton"
    with pytest.raises(
        ToolchainError, match=r"triton 3\.7\.1 was installed over fbtriton.*pip uninstall -y triton && pip"
    ):
        toolchain.require_tlx()
    site.apply(install.steps(state))
    _healthy()


def test_fbtriton_installed_over_upstream_works_but_is_cleaned(site: Site) -> None:
    site.install("triton")
    site.install("fbtriton")
    state = toolchain.inspect()
    assert state.has_tlx
    assert state.upstream == ["triton"]
    site.apply(install.steps(state))
    _healthy()
    assert not (site.folder / "triton/only_upstream.py").exists()


def test_upstream_uninstalled_by_hand_leaves_holes_that_are_filled(site: Site) -> None:
    site.install("fbtriton")
    site.install("triton")
    site.uninstall("triton")
    state = toolchain.inspect()
    assert state.folder is None
    assert "is missing, though fbtriton is registered" in toolchain.explain(state)
    site.apply(install.steps(state))
    _healthy()


def test_upstream_alone_has_no_tlx(site: Site) -> None:
    site.install("triton")
    state = toolchain.inspect()
    assert toolchain.explain(state) == "the installed `triton` (triton 3.7.1) is upstream's, which has no TLX"
    assert toolchain.toolchain() == "triton 3.7.1, ptxas none"
    site.apply(install.steps(state))
    _healthy()


def test_nothing_installed(site: Site) -> None:
    state = toolchain.inspect()
    assert toolchain.toolchain() == "no triton"
    assert not toolchain.has_tlx()
    assert "is missing" in toolchain.explain(state)
    with pytest.raises(ToolchainError, match="ptxas not found"):
        toolchain.binary("ptxas")
    site.apply(install.steps(state))
    _healthy()


def test_a_missing_compiler_is_damage_a_stripped_one_and_an_edited_python_file_are_not(site: Site) -> None:
    site.install("fbtriton")
    (site.folder / "triton/language/__init__.py").write_text("print('edited by a curious user')\n")
    assert toolchain.inspect().has_tlx
    (site.folder / "triton/_C/libtriton.so").write_text("stripped")
    assert toolchain.inspect().has_tlx
    (site.folder / "triton/_C/libtriton.so").unlink()
    state = toolchain.inspect()
    assert not state.has_tlx
    assert "some of fbtriton's files are gone" in toolchain.explain(state)


@pytest.mark.parametrize(
    ("source", "version"),
    [("3.7.4+fb", "3.7.4"), ("3.8.0+git1a2b3c", "3.8.0+git1a2b3c"), ("3.8.0.dev20260101", "3.8.0.dev20260101")],
)
def test_a_copy_without_metadata_gives_its_own_version(site: Site, source: str, version: str) -> None:
    site.install("fbtriton")
    shutil.rmtree(site.folder / f"fbtriton-{FB}.dist-info")
    (site.folder / "triton/__init__.py").write_text(f"__version__ = '{source}'\n")
    state = toolchain.inspect()
    assert state.has_tlx
    assert state.owner is None
    assert toolchain.toolchain() == f"fbtriton {version}, ptxas none"


def test_a_copy_without_a_version_does_not_crash(site: Site) -> None:
    site.install("fbtriton")
    shutil.rmtree(site.folder / f"fbtriton-{FB}.dist-info")
    (site.folder / "triton/__init__.py").write_text("")
    assert toolchain.toolchain() == "fbtriton unknown, ptxas none"


def test_a_copy_set_before_the_installed_packages_is_the_one_that_counts(
    site: Site, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("triton")
    copy = Site(tmp_path_factory.mktemp("copy"))
    copy.install("fbtriton")
    shutil.rmtree(copy.folder / f"fbtriton-{FB}.dist-info")
    monkeypatch.setattr(sys, "path", [str(copy.folder), str(site.folder)])
    state = toolchain.inspect()
    assert (state.owner, state.version, state.has_tlx) == (None, FB, True)


def _scratch_environment(tmp_path: Path, wheels: Path) -> tuple[Path, dict[str, str]]:
    """A virtual environment that borrows pip and all dependencies from this one, and installs from `wheels` only."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    (Path(purelib) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return python, variables | {"PYTHONPATH": str(ROOT), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip in this environment")
@pytest.mark.parametrize("order", [("fbtriton", "triton"), ("triton", "fbtriton")], ids="-then-".join)
def test_the_install_command_leaves_one_triton_in_a_real_environment(tmp_path: Path, order: tuple[str, str]) -> None:
    for name, (version, _) in DISTRIBUTIONS.items():
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in _with_metadata(name).items():
                wheel.writestr(path, text)
    python, variables = _scratch_environment(tmp_path, tmp_path)

    def run(*arguments: str) -> str:
        command = [str(python), *arguments]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    for name in order:
        # The borrowed fbtriton lies outside the environment, where pip would not replace it.
        run("-m", "pip", "install", "--no-deps", "--ignore-installed", f"{name}=={DISTRIBUTIONS[name][0]}")
    assert "+ pip uninstall --yes triton" in run("-m", "tlxgen.install")
    assert "+ pip" not in run("-m", "tlxgen.install")
    look = "from tlxgen.toolchain import inspect; s = inspect(); print(s.has_tlx, s.owner, s.upstream, s.folder)"
    assert run("-c", look).startswith(f"True fbtriton [] {tmp_path}")


def _build(hook: str, folder: Path) -> Path:
    code = f"import hatchling.build as b; print(b.{hook}({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.strip().splitlines()[-1]


def _shipped_files() -> set[str]:
    """Every file of the folders that `tlxgen.paths` looks for, less what no commit holds."""
    folders = ("templates", "search_spaces", "cache")
    found = {
        path.relative_to(ROOT).as_posix() for name in folders for path in (ROOT / name).rglob("*") if path.is_file()
    }
    return {path for path in found if "__pycache__" not in path and not Path(path).name.startswith(".")}


def test_templates_spaces_and_cache_travel_in_the_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(_build("build_wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    assert _shipped_files(), "nothing to ship"
    assert {f"tlxgen/_shipped/{path}" for path in _shipped_files()} <= names
    assert "tlxgen/paths.py" in names
    assert "tlxgen/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tlxgen"}
    look = "from tlxgen import paths; print(paths.TEMPLATES)"
    where = subprocess.run(
        [sys.executable, "-c", look], cwd=tmp_path / "site", check=True, capture_output=True, text=True
    )
    assert where.stdout.strip() == str(tmp_path / "site/tlxgen/_shipped/templates")


def test_an_editable_install_points_here_and_copies_nothing(tmp_path: Path) -> None:
    with zipfile.ZipFile(_build("build_editable", tmp_path)) as wheel:
        assert wheel.read("_tlxgen.pth").decode().strip() == str(ROOT)
        assert not [name for name in wheel.namelist() if "_shipped" in name]


def test_the_sdist_holds_what_a_build_and_the_tests_need(tmp_path: Path) -> None:
    with tarfile.open(_build("build_sdist", tmp_path)) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert _shipped_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "tlxgen/paths.py", "tests/test_install.py"} <= names
