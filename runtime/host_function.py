"""A C function of the host as a step of a GPU's stream: CUDA's cuLaunchHostFunc, HIP's hipLaunchHostFunc.

Both are stable names of libraries that torch has loaded already, so nothing is needed at build time. In a stream that is
being captured the call becomes a node of the graph. The driver calls the function on a thread of its own; the function
must not use the GPU's interface and must not need Python.
"""

import ctypes
import os
from dataclasses import dataclass

from pi_toolkit.profiler.errors import HostFunctionError


@dataclass(frozen=True)
class HostFunctions:
    """The launcher of one driver library; ``symbol`` has the signature int(stream, void (*)(void *), void *)."""

    library: ctypes.CDLL
    symbol: str

    def launch(self, stream: int, function: int, data: int) -> None:
        """Queue ``function(data)`` on *stream*, all three as addresses; whoever calls keeps *data* alive.

        Raises ``HostFunctionError`` with the driver's code when it refuses.
        """
        launcher = getattr(self.library, self.symbol)
        launcher.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        launcher.restype = ctypes.c_int
        code = launcher(stream, function, data)
        if code:
            raise HostFunctionError(f"{self.symbol} of the GPU's driver returned {code}")


def driver(is_hip: bool) -> HostFunctions | None:
    """The launcher of this machine's driver; None where its library is not to be found."""
    names, symbol = (["libcuda.so.1", "nvcuda.dll"], "cuLaunchHostFunc")
    if is_hip:
        names, symbol = ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"], "hipLaunchHostFunc"
    # The library that torch has loaded comes first: a second copy of HIP's runtime knows nothing of torch's streams.
    loaded = ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0)
    for name, how in [(name, loaded) for name in names] + [(name, ctypes.DEFAULT_MODE) for name in names]:
        try:
            library = ctypes.CDLL(name, how)
            getattr(library, symbol)
        except (OSError, AttributeError):
            continue
        return HostFunctions(library, symbol)
    return None
