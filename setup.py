"""The fused CPU kernels: a plain C library without Python or torch in it, so a C++ compiler is all it takes to build.

Optional: where it cannot be built, mambakit runs on torch alone; the installation and `mambakit doctor` say so.
"""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("src/mambakit/kernels/cpu/csrc")
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-g0", "-Wall", "-Werror=vla"]
MISSING = (
    "mambakit: the fused CPU kernels were NOT built; everything runs in torch's operators, several times slower. "
    "Install a C++ compiler (GCC or Clang), then reinstall with --no-cache-dir. `mambakit doctor` says what is used."
)


class Build(build_ext):
    """One source per instruction set, compiled at the same time."""

    def build_extensions(self) -> None:
        compile_one = self.compiler.compile

        def compile_all(sources, *args, **options):
            with ThreadPoolExecutor() as pool:
                objects = pool.map(lambda source: compile_one([source], *args, **options), sources)
                return [path for found in objects for path in found]

        self.compiler.compile = compile_all
        super().build_extensions()
        if not all(Path(self.get_ext_fullpath(ext.name)).is_file() for ext in self.extensions):
            tell(MISSING)

    def get_export_symbols(self, ext):
        return ext.export_symbols


class Wheel(bdist_wheel):
    """The library knows nothing of Python: one wheel per platform, for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def tell(line: str) -> None:
    """On standard error, and on the terminal itself, since pip keeps what is written to the former from view."""
    print(line, file=sys.stderr)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(f"\n{line}", file=terminal)


kernels = Extension(
    "mambakit.kernels.cpu._native",
    sources=[str(CSRC / name) for name in ("library.cpp", "plain.cpp", "avx2.cpp", "avx512.cpp", "neon.cpp")],
    depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
    language="c++",
    extra_compile_args=[*FLAGS, f"-ffile-prefix-map={Path.cwd()}=."],
    py_limited_api=True,
    optional=True,
)

# A compiler of another dialect (MSVC) cannot read the vector types: pure Python there.
setup(
    ext_modules=[] if sys.platform == "win32" else [kernels],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
