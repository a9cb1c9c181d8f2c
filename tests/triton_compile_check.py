"""Compiles the Triton kernels for GPUs that are not there, and prints what they need; run by test_runtime_triton_kernels.py.

    python triton_compile_check.py cuda:80 cuda:90 hip:gfx942
    python triton_compile_check.py --predicted cuda:89          only what one token needs in mode predicted

What is compiled is what the product launches: its own functions run on CPU tensors, with the launch replaced by a record of
its arguments. One JSON object per line: kernel, variant, target, registers, spills (bytes or registers), shared_bytes, and
wide_loads, the number of reads of 16 bytes per thread in an NVIDIA kernel.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pi_toolkit.runtime.kernels import sparse_ffn_triton as kernel
from pi_toolkit.runtime.kernels.packed_matrix import KINDS
from sparse_ffn_cases import COMPUTATIONS, draw, make_neurons

HIDDEN, NEURONS = 4096, 80
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
}
OPTIONS = ("num_warps", "num_stages")


def launches(predicted_only: bool) -> dict[str, tuple[ASTSource, dict[str, int]]]:
    """Every kernel in every variant the product asks for, by a description."""
    recorded: dict[str, tuple[ASTSource, dict[str, int]]] = {}

    def record(function: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        source = as_source(function, dict(zip(function.arg_names, arguments, strict=False)) | constants)
        chosen = ("KIND", "READS", "GATHER", "HAS_BIAS", "BY_SCORE", "TOKENS")
        variant = " ".join(f"{name}={constants[name]}" for name in chosen if name in constants)
        types = [kind for name, kind in source.signature.items() if name in ("first", "down")]
        recorded.setdefault(" ".join([function.__name__, variant, *types]), (source, options))

    JITFunction.run = record
    for kind in KINDS:
        for tokens, (activation, form, mode) in itertools.product((1, 2, 4), COMPUTATIONS):
            # Two tokens are a part of what four are.
            rare = tokens == 2 and (kind != "float16" or mode != "predicted")
            if not rare and (not predicted_only or (mode == "predicted" and tokens == 1)):
                neurons = make_neurons(kind, NEURONS, HIDDEN, activation, form)
                kernel.sparse_ffn(neurons, draw(tokens, HIDDEN), mode, draw(tokens, NEURONS), 0.0)
    return recorded


def as_source(function: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """What Triton would compile for these arguments, by its rules for constants and multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(function.params):
        name, value = parameter.name, arguments[parameter.name]
        special = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or special:
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], multiple = "*" + TYPES[value.dtype], value.data_ptr() % 16 == 0
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            multiple = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if multiple:
            attributes[(number,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, attributes)


def needs(compiled: Any, backend: str) -> dict[str, int]:
    """Registers, spills and shared memory of a compiled kernel, from the machine code's own tables."""
    if backend == "hip":
        text = compiled.asm["amdgcn"]

        def entry(name: str) -> int:
            return int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])

        spills = entry("vgpr_spill_count") + entry("sgpr_spill_count") + entry("private_segment_fixed_size")
        return {"registers": entry("vgpr_count"), "spills": spills, "shared_bytes": compiled.metadata.shared}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, shared, local = map(int, re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)[0])
    wide = len(re.findall(r"ld\.global\.v4", compiled.asm["ptx"]))
    shared = max(shared, compiled.metadata.shared)
    return {"registers": registers, "spills": stack + local, "shared_bytes": shared, "wide_loads": wide}


def reports(targets: list[str], predicted_only: bool) -> Iterator[dict[str, Any]]:
    for description, (source, options) in launches(predicted_only).items():
        for target in targets:
            backend, _, name = target.partition(":")
            where = GPUTarget(backend, int(name) if backend == "cuda" else name, 64 if name.startswith("gfx9") else 32)
            compiled = triton.compile(source, target=where, options=options)
            assert compiled.asm["cubin" if backend == "cuda" else "hsaco"]
            yield {"kernel": description, "target": target, **needs(compiled, backend)}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    only = "--predicted" in arguments
    for report in reports([argument for argument in arguments if argument != "--predicted"], only):
        print(json.dumps(report), flush=True)
