"""The C++ kernels under the address, undefined-behaviour and thread sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "runtime" / "kernels"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
FLAGS = {
    "row_kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "row_kernels_avx512": AVX512,
    "row_kernels_avx512_vnni": [*AVX512, "-mavx512vnni"],
}


def build(folder: Path, sanitizer: str) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler, "the tests need a C++ compiler"
    objects = []
    for source in [*sorted(KERNELS.glob("*.cpp")), ROOT / "tests" / "native" / "kernels_check.cpp"]:
        if source.stem == "cpu_kernels":  # Python's view of the others
            continue
        objects.append(folder / f"{source.stem}.o")
        options = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{KERNELS}"]
        command = [compiler, *options, *FLAGS.get(source.stem, []), "-w", "-c", str(source), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    program = folder / "kernels_check"
    subprocess.run(
        [compiler, f"-fsanitize={sanitizer}", *map(str, objects), "-o", str(program), "-pthread"], check=True
    )
    return program


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_are_clean(tmp_path: Path, sanitizer: str) -> None:
    """A read past a row, a race between threads, a shift that is undefined: wrong text on somebody else's machine."""
    result = subprocess.run([build(tmp_path, sanitizer)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
