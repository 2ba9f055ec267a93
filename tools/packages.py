"""Builds what would be published, and tests that: the wheel, the source distribution and the two crates.

Each distribution goes into an environment of its own, outside the repository, which borrows nothing but third-party
packages (torch) from the development environment. There the README's example runs and must print what the README says.
The crates are unpacked elsewhere and their tests run. What was built stays in out/packages.

    python tools/packages.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "packages"
TARGET = ROOT / "target" / "packages"
CARGO_HOME = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
MOST_BYTES = 3_000_000
"""Of the native module. It has 1.7 million stripped, and 9 million with its line tables."""
CRATES = ("radixstate-codec", "radixstate")
PYTHONS = ("3.12", "3.13", "3.14")
"""Beside the running one: where they are installed, the wheel must import there too."""

NATIVE = """
import radixstate
from radixstate._native import Cache
cache = Cache(page_size=4, checkpoint_stride=8, kv_pages=16, active_slots=2, checkpoint_slots=2)
cache.finish(cache.start(range(9)).sequence)
cache.check()
"""
"""Runs without torch."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(holds: object, otherwise: str) -> None:
    """Ends with a message unless something holds."""
    if not holds:
        sys.exit(f"packages: {otherwise}")


def remap() -> str:
    """Flags that keep the paths of this machine out of panic messages."""
    sysroot = run("rustc", "--print", "sysroot").strip()
    prefixes = {ROOT: "radixstate", CARGO_HOME: "cargo", f"{sysroot}/lib/rustlib/src/rust": "rust"}
    return "\x1f".join(f"--remap-path-prefix={path}={name}" for path, name in prefixes.items())


def build() -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    shutil.rmtree(OUT, ignore_errors=True)
    maturin = Path(sys.executable).with_name("maturin")
    run(maturin, "sdist", "-o", OUT)
    run(
        *(maturin, "build", "--release", "--locked", "-i", sys.executable, "-o", OUT),
        CARGO_TARGET_DIR=str(TARGET),
        CARGO_ENCODED_RUSTFLAGS=remap(),
    )
    (wheel,), (sdist,) = OUT.glob("*.whl"), OUT.glob("*.tar.gz")
    return wheel, sdist


def inspect_wheel(wheel: Path) -> None:
    """Size, paths, tag, licence, page."""
    require("-cp311-abi3-" in wheel.name, f"{wheel.name} is not for the stable ABI of Python 3.11")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (module,) = (name for name in names if name.endswith(".so"))
        native = archive.read(module)
        for name in names:
            for path in (ROOT, CARGO_HOME):
                require(
                    os.fsencode(path) not in archive.read(name),
                    f"{name} names {path}, a path of this machine",
                )
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        page = message_from_bytes(archive.read(metadata))
    require(len(native) < MOST_BYTES, f"{module} has {len(native)} bytes, over {MOST_BYTES}: is it stripped?")
    for needed in ("radixstate/py.typed", "radixstate/_native.pyi", "radixstate/kernels/int8.cu"):
        require(needed in names, f"the wheel lacks {needed}")
    require(any(name.endswith("/LICENSE") for name in names), "the wheel lacks the licence")
    strange = [name for name in names if not re.match(r"radixstate(-[\d.]+\.dist-info)?/", name)]
    require(not strange, f"the wheel has {strange}")
    require(page["License-Expression"] == "Apache-2.0", "the page names no licence")
    require(len(page.get_all("Project-URL", [])) >= 3, "the page has no project URLs")
    print(f"{wheel.name}: {wheel.stat().st_size} bytes, its module {len(native)}")


def clean_environment(folder: Path) -> Path:
    """The interpreter of a new environment that sees the packages of this one, and not its radixstate."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    shared = [sysconfig.get_path("purelib"), *(entry for entry in sys.path if "site-packages" in entry)]
    Path(packages, "shared.pth").write_text("\n".join(shared))
    return python


def install(python: Path, what: Path, **environment: str) -> None:
    """Installs one distribution and nothing else."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    alone = ("--quiet", "--no-index", "--no-deps", "--ignore-installed", "--no-build-isolation")
    run(*pip, *alone, what, **environment)


def example(python: Path, folder: Path) -> None:
    """Runs the README's first example with what is installed in an environment."""
    found = Path(run(python, "-c", "import radixstate; print(radixstate.__file__)", cwd=folder).strip())
    require(folder in found.parents, f"radixstate comes from {found}, not from {folder}")
    match = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    require(match, "the README has no example")
    assert match
    code, expected = match.groups()
    printed = run(python, "-W", "error", "-c", code, cwd=folder)
    require(printed == expected, f"the README's example printed\n{printed}instead of\n{expected}")


def test_wheel(wheel: Path, folder: Path) -> None:
    """The README's example, and an import by every Python that is here."""
    python = clean_environment(folder / "wheel")
    install(python, wheel)
    example(python, folder / "wheel")
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    for version in PYTHONS:
        name = f"python{version}"
        path = shutil.which(name)
        # A shim of a version manager may be there without the interpreter.
        if path is None or subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
            print(f"not imported with Python {version}: there is no {name} here")
            continue
        run(path, "-W", "error", "-c", NATIVE, cwd=folder, PYTHONPATH=str(unpacked))
        print(f"imported with Python {version}")


def test_sdist(sdist: Path, folder: Path) -> None:
    """Builds it without the repository; then the README's example and tests that come with it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("radixstate-*")
    for needed in (
        "LICENSE",
        "README.md",
        "Cargo.lock",
        "CHANGELOG.md",
        "kernels/int8.cu",
        "tests/conftest.py",
    ):
        require((source / needed).is_file(), f"the source distribution lacks {needed}")
    require(
        not [*source.rglob("*.so"), *source.rglob("__pycache__")], "the source distribution has built files"
    )
    python = clean_environment(folder / "sdist")
    # How fast it is built is of no matter here: without optimization.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    install(python, source, PATH=path, CARGO_TARGET_DIR=str(TARGET), MATURIN_PEP517_ARGS="--profile dev")
    example(python, folder / "sdist")
    tests = [f"tests/test_{name}.py" for name in ("cases", "docs", "native_arguments", "packaging")]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=source)


def test_crates(folder: Path) -> None:
    """Packs the crates, and runs the tests that are in them."""
    shutil.rmtree(ROOT / "target" / "package", ignore_errors=True)
    packages = [word for crate in CRATES for word in ("-p", crate)]
    run("cargo", "package", "--quiet", "--locked", "--allow-dirty", "--no-verify", *packages)
    for crate in CRATES:
        (packed,) = (ROOT / "target" / "package").glob(f"{crate}-[0-9]*.crate")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        source = folder / packed.stem
        require_files(source, ("LICENSE", "README.md", "Cargo.lock", "src/lib.rs"))
        # The target folder and the profile of `make test`, whose dependencies are then built already.
        test = ("cargo", "test", "--quiet", "--locked")
        run(*test, cwd=source, CARGO_TARGET_DIR=str(ROOT / "target"), CARGO_PROFILE_TEST_OPT_LEVEL="1")
        shutil.copy(packed, OUT)
        print(f"{packed.name}: {packed.stat().st_size} bytes, tested")


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Ends unless a folder has all of these files."""
    lacking = [name for name in names if not (folder / name).is_file()]
    require(not lacking, f"{folder.name} lacks {lacking}")


def main() -> None:
    """Everything, with the seconds that each part took."""
    wheel, sdist = build()
    inspect_wheel(wheel)
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        parts = {
            "wheel": lambda: test_wheel(wheel, folder),
            "sdist": lambda: test_sdist(sdist, folder),
            "crates": lambda: test_crates(folder),
        }
        for part, test in parts.items():
            begin = time.monotonic()
            test()
            print(f"{part}: {time.monotonic() - begin:.0f} s")
    print(f"packages: {', '.join(sorted(path.name for path in OUT.iterdir()))} are sound")


if __name__ == "__main__":
    main()
