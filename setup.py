"""Builds the native CPU kernels where there is a C++17 compiler; without one, everything else installs all the same.

    pip install .                             builds them, too
    python setup.py build_ext --inplace       builds them in the source tree
    pip wheel --no-deps .                     a wheel for this platform and any Python 3 (py3-none-linux_x86_64)
    QUIRE_PURE=1 pip wheel --no-deps .        a wheel without them, for any platform (py3-none-any); so is one without a compiler
    make dist QUIRE_PROJECT_URL=https://...   a release: links of the README, and project URLs, that work on a package index

One source, src/quire/kernels/native/kernels.cpp, is compiled once for each instruction set, with flags of its own, into one
library. Which of them runs is decided when the library is loaded. pyproject.toml has all the rest.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PURE = bool(os.environ.get("QUIRE_PURE"))
PROJECT_URL = os.environ.get("QUIRE_PROJECT_URL", "").rstrip("/")
"""Where the project's repository can be browsed. The repository itself does not know: it has no fixed home."""
FOLDER = Path("src/quire/kernels/native")
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# GCC's own headers of intrinsics are not free of the first two; the others are about how vectors travel between functions.
QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi", "-Wno-ignored-attributes")
AVX512 = ("-march=x86-64-v3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_BF16 = (*AVX512, "-mavx512vbmi", "-mavx512bf16")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86-64": {
        "portable": (),
        "avx2": ("-march=x86-64-v3",),
        "avx512": AVX512,
        "avx512_bf16": AVX512_BF16,
        "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {"neon": ()},
}


def levels() -> dict[str, tuple[str, ...]]:
    machine = {"amd64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    return LEVELS.get(machine, {"portable": ()})


class Build(build_ext):
    """Compiles every level side by side, unless the source tree has a library that is newer than all sources. QUIRE_CXXFLAGS adds
    flags: `make sanitize` does."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))  # loaded with ctypes: of no Python in particular

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        more = os.environ.get("QUIRE_CXXFLAGS", "").split()
        made, sources = FOLDER / "libquire.so", [*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"), Path(__file__)]
        if not more and made.exists() and made.stat().st_mtime > max(path.stat().st_mtime for path in sources):
            shutil.copy2(made, target)
            return
        # setuptools guesses compilers from how Python was built; here only a C++ one will do.
        compiler = os.environ.get("CXX", "c++").split()
        has_amx = "amx" in levels() and self._compiles(compiler, LEVELS["x86-64"]["amx"])
        common = (*COMMON, *QUIET, *(("-DQUIRE_HAS_AMX",) if has_amx else ()))
        parts = {
            name: ("kernels.cpp", (*flags, f"-DQUIRE_LEVEL={name}", "-fno-exceptions", "-fno-rtti"))
            for name, flags in levels().items()
            if name != "amx" or has_amx
        }
        parts |= {"library": ("library.cpp", ()), "probe": ("probe.cpp", ())}
        folder = Path(self.build_temp) / "native"
        folder.mkdir(parents=True, exist_ok=True)

        def compile(name: str) -> Path:
            source, flags = parts[name]
            made = folder / f"{name}.o"
            self._run([*compiler, *common, *flags, *more, "-c", str(FOLDER / source), "-o", str(made)])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile, parts))
        self._run([*compiler, *more, "-shared", *map(str, objects), "-o", str(target), "-ldl", "-lpthread"])

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"there is no C++ compiler {command[0]!r} here ({error})") from error
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        print(done.stderr, end="")

    def _compiles(self, compiler: list[str], flags: tuple[str, ...]) -> bool:
        """Whether a compiler knows these flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text("#include <immintrin.h>\nint main() { return 0; }\n")
            try:
                self._run([*compiler, *flags, "-c", str(source), "-o", str(Path(folder, "probe.o"))])
            except RuntimeError:
                return False
        return True

    def run(self) -> None:
        try:
            super().run()
        except RuntimeError as error:
            for ext in self.extensions:
                # An earlier build may have left one: this build has none.
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            print(f"quire: the native CPU kernels are not built, and the torch kernels will run on CPUs: {error}")


class BuildPackage(build_py):
    """Puts the examples into the package, where `quire example` finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and Path("examples").is_dir():
            target = Path(self.build_lib, "quire", "examples")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("examples", target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


class Wheel(bdist_wheel):
    """The library is loaded with ctypes: a wheel that has it is for one platform and any Python 3, one without for all."""

    def run(self) -> None:
        self.run_command("build")
        built = Path(self.get_finalized_command("build").build_lib, FOLDER.relative_to("src"), "libquire.so")
        if not built.exists():
            self.root_is_pure, self.distribution.ext_modules = True, []
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


def readme(version: str) -> str:
    """README.md for a package index, where links relative to the repository lead nowhere: they become absolute, or, if the
    repository has no address, plain text."""
    text = Path("README.md").read_text(encoding="utf-8")
    blob, raw = (f"{PROJECT_URL}/{kind}/v{version}/" for kind in ("blob", "raw"))

    def link(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        return f"{image}[{words}]({raw if image else blob}{target})" if PROJECT_URL else words

    def source(found: re.Match[str]) -> str:
        absolute = re.match(r"[a-z]+:", found[2]) or not PROJECT_URL
        return found[0] if absolute else f"{found[1]}{raw}{found[2]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for number in range(0, len(parts), 2):  # the others are code
        parts[number] = re.sub(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", link, parts[number])
        parts[number] = re.sub(r'((?:src|srcset)=")([^"]+)', source, parts[number])
    return "".join(parts)


def urls() -> dict[str, str]:
    if not PROJECT_URL:
        return {}
    pages = {"Source": "", "Documentation": "/tree/main/docs", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: f"{PROJECT_URL}{page}" for name, page in pages.items()}


VERSION = re.search(r'^__version__ = "(.+)"', Path("src/quire/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION
setup(
    ext_modules=[] if PURE else [Extension("quire.kernels.native.libquire", [str(FOLDER / "kernels.cpp")])],
    cmdclass={"build_ext": Build, "build_py": BuildPackage, "bdist_wheel": Wheel},
    long_description=readme(VERSION[1]),
    long_description_content_type="text/markdown",
    project_urls=urls(),
)
