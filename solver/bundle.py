"""The unit of placement: a bundle, which lives on one device as a whole.

The solver knows of a bundle only its layer, its bytes, how many neurons it holds, what it is worth (impact) and what a
token reads of it. Today bundles are groups of FFN neurons (:mod:`.neuron_groups`); an expert of a mixture of experts would
be one as well.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bundles:
    """The bundles of one layer, most impact per byte first.

    ``neurons``: int64 [n], the layer's neuron ids in the order of the bundles; bundle b holds the ``sizes[:b].sum()``-th of
    them and the following. ``sizes``: int64 [bundles], neurons in each. ``num_bytes``: int64 [bundles]. ``impacts``:
    [bundles], summed firing counts (int64, float64 where counts are relative). ``read_bytes``: float64 [bundles], bytes that
    a token is expected to read.
    """

    neurons: np.ndarray
    sizes: np.ndarray
    num_bytes: np.ndarray
    impacts: np.ndarray
    read_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def members(self, chosen: np.ndarray) -> np.ndarray:
        """Ascending int32 neuron ids of the bundles for which *chosen*, bool [bundles], is true."""
        return np.sort(self.neurons[np.repeat(chosen, self.sizes)]).astype(np.int32)

    def neuron_devices(self, devices: np.ndarray) -> np.ndarray:
        """int8 [n], the device of every neuron by its id, from that of every bundle."""
        of_neuron = np.empty(len(self.neurons), dtype=np.int8)
        of_neuron[self.neurons] = np.repeat(devices, self.sizes)
        return of_neuron

    def leading(self, neurons: int) -> int:
        """How many bundles, from the first, hold at least *neurons* neurons."""
        return int(np.searchsorted(self.sizes.cumsum(), neurons)) + 1 if neurons > 0 else 0
