"""The wheel holds what an installation needs, imports outside the repository, and ships no top-level model_patches."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # Built from a copy: setuptools leaves build/ and *.egg-info beside the sources.
    for name in ("pyproject.toml", "README.md", "LICENSE", "mok_hf", "model_patches"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def modules(package: str) -> set[str]:
    """The Python files under a folder of the repository, relative to its parent."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}


def test_wheel_holds_every_module_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    expected = modules("mok_hf") | {f"mok_hf/{name}" for name in modules("model_patches")}
    assert files == expected
    assert len(licences) == 1


def test_wheel_imports_outside_the_repository(wheel: Path, tmp_path: Path):
    """From an empty folder, ahead of the editable install: no kernel, no repository, nothing but the wheel."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import mok_hf, mok_hf.model_patches as patches\n"
        "assert len(patches.ADAPTERS) > 10\n"
        "print(mok_hf.__file__); print(patches.__file__); print(mok_hf.__version__)\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('model_patches') is None, 'a top-level model_patches is installed'\n"
        "for name in mok_hf.__all__: getattr(mok_hf, name)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    package, patches, version = result.stdout.split()
    assert Path(package) == site / "mok_hf/__init__.py"
    assert Path(patches) == site / "mok_hf/model_patches/__init__.py"
    assert f"mok_hf-{version}-" in wheel.name


def test_editable_install_has_no_top_level_model_patches(tmp_path: Path):
    program = "import mok_hf.model_patches, importlib.util; print(importlib.util.find_spec('model_patches'))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == "None", result.stdout + result.stderr
