"""Builds the native CPU kernels where there is a C++17 compiler; without one, everything else installs all the same.

    pip install .                             builds them by the way
    python setup.py build_ext --inplace       builds them in the source tree

One source, src/quire/kernels/native/kernels.cpp, is compiled once for each instruction set, with flags of its own, into one
library. Which of them runs is decided when the library is loaded. pyproject.toml has all the rest.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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
            print(f"quire: the native CPU kernels are not built, and the torch kernels will run on CPUs: {error}")


setup(ext_modules=[Extension("quire.kernels.native.libquire", [str(FOLDER / "kernels.cpp")])], cmdclass={"build_ext": Build})
