"""The wheel and the sdist: what is in them, and that the wheel is enough.

`make test-wheel` runs this. Building and installing take minutes, and need a package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import kdn

pytestmark = pytest.mark.wheel

ROOT = Path(kdn.__file__).parent.parent
PROFILE = "kdn/profiles/8343b7cfb81b5f6e79a387b29328840d.safetensors"
MAX_BYTES = 70 << 20  # nearly all of it is the profile; PyPI takes files of up to 100 MB
MAX_CODE_BYTES = 4 << 20
INSTALL_S, DEMO_S = 1800.0, 900.0  # on machines that do other things, too
EXTRAS = {
    "transformers", "vllm", "gpu", "redis", "s3", "otel", "plot", "events", "docs", "dev",
}  # fmt: skip


def called(*command: str | Path, deadline_s: float, **settings: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, check=False, timeout=deadline_s, **settings,
    )  # type: ignore[call-overload]  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    called(sys.executable, "-m", "build", "--outdir", folder, ROOT, deadline_s=INSTALL_S)
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_the_package_and_its_profile_and_nothing_else(
    built: tuple[Path, Path],
) -> None:
    wheel, _ = built
    assert wheel.name.endswith("-py3-none-any.whl")  # no compiler, no platform
    assert wheel.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(wheel) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
    code = {name: size for name, size in sizes.items() if name.startswith("kdn/")}
    assert code.pop(PROFILE) == (ROOT / PROFILE).stat().st_size
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "kdn").rglob("*.py")}
    assert ours | {"kdn/py.typed"} <= set(code)
    assert sum(code.values()) < MAX_CODE_BYTES
    assert not [name for name in sizes if not name.startswith(("kdn/", "kdn-"))]
    assert not [name for name in sizes if "__pycache__" in name or "/tests/" in name]


def test_the_sdist_has_what_builds_the_wheel_and_no_tests(built: tuple[Path, Path]) -> None:
    _, sdist = built
    assert sdist.stat().st_size < MAX_BYTES
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", PROFILE} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "."))]


def test_every_extra_is_declared(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        told = HeaderParser().parsestr(archive.read(name).decode())
    assert set(told.get_all("Provides-Extra", [])) == EXTRAS


@pytest.mark.model
def test_the_demo_runs_where_nothing_but_the_wheel_is_installed(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """torch comes first, by the pin of constraints.txt: a range may choose a build with gigabytes
    of GPU libraries."""
    wheel, _ = built
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    called(sys.executable, "-m", "venv", venv, deadline_s=INSTALL_S)
    python = venv / "bin" / "python"
    [torch] = [
        line for line in (ROOT / "constraints.txt").read_text().split() if line[:7] == "torch=="
    ]
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    called(*pip, torch, deadline_s=INSTALL_S)
    called(*pip, f"{wheel}[transformers,plot]", deadline_s=INSTALL_S)
    told = called(
        venv / "bin" / "kdn", "demo", "--quick",
        cwd=empty, env={**os.environ, "PATH": "/usr/bin:/bin"}, deadline_s=DEMO_S,
    )  # fmt: skip
    assert "Time to first token" in told
    assert (empty / "kdn-demo.png").is_file()
