"""The fused CPU kernels: a plain C library without Python or torch in it, so a C++ compiler is all it takes to build.

Optional: where it cannot be built, mambakit installs and runs on torch alone, and says so (`mambakit doctor`).
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("src/mambakit/kernels/cpu/csrc")
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Werror=vla"]


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

    def get_export_symbols(self, ext):
        return ext.export_symbols


kernels = Extension(
    "mambakit.kernels.cpu._native",
    sources=[str(CSRC / name) for name in ("library.cpp", "plain.cpp", "avx2.cpp", "avx512.cpp")],
    depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
    language="c++",
    extra_compile_args=[*FLAGS, f"-ffile-prefix-map={Path.cwd()}=."],
    py_limited_api=True,
    optional=True,
)

# A compiler of another dialect (MSVC) cannot read the vector types: pure Python there.
setup(
    ext_modules=[] if sys.platform == "win32" else [kernels],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
