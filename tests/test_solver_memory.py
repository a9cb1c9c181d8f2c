"""Bytes of units against sums written out by hand, and prices and groups against the paper's formulas."""

from dataclasses import replace

import numpy as np
import pytest

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.solver.costs import Costs, costs
from pi_toolkit.solver.memory import neuron_bytes, unit_bytes
from pi_toolkit.solver.neuron_groups import group_neurons
from solver_cases import LLAMA_7B, MISTRAL_7B, OPT_175B, machine, tiny_shape


@pytest.mark.parametrize(
    ("dtype", "row"), [("float32", 16384), ("bfloat16", 8192), ("float16", 8192), ("q8_0", 4352), ("q4_0", 2304)]
)
def test_a_llama_neuron_is_three_rows(dtype, row):
    """PowerInfer takes n_ff for the row length and divides by 4.5: a budget that is wrong by a quarter."""
    assert neuron_bytes(LLAMA_7B, dtype) == 3 * row


def test_an_opt_neuron_has_a_bias_that_is_float32_in_every_type():
    assert neuron_bytes(OPT_175B, "bfloat16") == 2 * 12288 * 2 + 4
    assert neuron_bytes(OPT_175B, "q4_0") == 2 * 12288 // 32 * 18 + 4


def test_units_sum_to_the_parameters_of_the_model():
    """A tensor that no unit counts is memory the budget does not know."""
    for shape in (LLAMA_7B, MISTRAL_7B, OPT_175B):
        units = unit_bytes(shape, "float32", context=1, batch_size=1)
        head = 0 if shape.tied_embeddings else shape.vocabulary_size * shape.hidden_size
        final_norm = units.head // 4 - shape.vocabulary_size * shape.hidden_size
        dense = sum(units.attention) - shape.num_layers * units.kv_cache + units.embedding
        neurons = sum(shape.ffn_sizes) * units.neuron
        assert (dense + neurons) // 4 + head + final_norm == shape.num_parameters()


def test_kv_cache_uses_the_key_value_heads_and_grows_with_context_and_batch():
    """A cache sized by all heads is four times too large for Mistral."""
    units = unit_bytes(MISTRAL_7B, "q4_0", context=4096, batch_size=3)
    assert units.kv_cache == 4096 * 3 * 2 * 8 * 128 * 2
    assert unit_bytes(MISTRAL_7B, "float32", 4096, 3).kv_cache == 2 * units.kv_cache


def test_predictors_have_the_size_of_their_width():
    shape = tiny_shape((64, 96))
    units = unit_bytes(shape, "q4_0", 1, 1, predictor_sizes=[32, 64])
    assert units.predictor == ((32 * 32 + 64 * 32) // 32 * 34, (64 * 32 + 96 * 64) // 32 * 34)
    assert unit_bytes(shape, "q4_0", 1, 1).predictor == (0, 0)
    four_bits = unit_bytes(shape, "q4_0", 1, 1, [32, 64], predictor_dtype="q4_0")
    assert four_bits.predictor == ((32 * 32 + 64 * 32) // 32 * 18, (64 * 32 + 96 * 64) // 32 * 18)


def test_the_head_of_a_q4_0_model_is_counted_as_it_is_held():
    """pi-run holds it in q8_0; counted in four bits, half of it was memory the budget did not know."""
    norm = 32 * 4
    assert unit_bytes(tiny_shape((64,)), "q4_0", 1, 1).head == 64 * 32 // 32 * 34 + norm
    assert unit_bytes(tiny_shape((64,)), "q8_0", 1, 1).head == 64 * 32 // 32 * 34 + norm


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(PlacementError, match="use --dtype bfloat16"):
        neuron_bytes(tiny_shape((64,), hidden_size=48), "q4_0")


def test_threshold_is_the_smallest_number_of_neurons_that_pays():
    """Eq. 4 of the paper at C_l, and not at C_l − 1."""
    hardware = machine()
    price = costs(hardware, hardware.gpu, neuron_bytes(LLAMA_7B, "q4_0"), 4096, batch_size=1)
    (fewest,) = price.min_gpu_neurons([11008])
    assert price.sync_seconds == 2e-5 + 2 * 4096 * 4 / 64e9
    for neurons, pays in ((fewest, True), (fewest - 1, False)):
        on_gpu = neurons * price.gpu_neuron_seconds + price.sync_seconds
        assert (on_gpu <= neurons * price.cpu_neuron_seconds) is pays


def test_threshold_where_the_gpu_cannot_win():
    """Eq. 4 has no solution there; a division by zero or a negative C_l would send neurons to a slower device."""
    assert Costs(1e-6, 1e-6, 1e-5).min_gpu_neurons([64, 64]) == (None, None)
    assert Costs(1e-6, 2e-6, 0.0).min_gpu_neurons([64]) == (None,)
    assert Costs(2e-6, 1e-6, 70e-6).min_gpu_neurons([64, 70, 71]) == (None, 70, 70)
    assert Costs(2e-6, 1e-6, 1e300).min_gpu_neurons([64]) == (None,)


def test_free_synchronisation_has_no_threshold():
    hardware = machine()
    assert costs(hardware, hardware.gpu, 8192, 4096, 1, sync_seconds=0.0).min_gpu_neurons([5]) == (0,)


def test_groups_are_of_similar_impact_and_ties_keep_the_order_of_ids():
    """An unstable sort gives another file on another machine."""
    (groups,) = group_neurons([np.array([1, 9, 9, 0, 9, 1, 5])], group_neurons=3)
    assert groups.neurons.tolist() == [1, 2, 4, 6, 0, 5, 3]
    assert groups.sizes.tolist() == [3, 3, 1] and groups.impacts.tolist() == [27, 7, 0]
    assert groups.members(np.array([True, False, True])).tolist() == [1, 2, 3, 4]


def test_counts_beyond_exact_arithmetic_are_refused():
    """An int64 sum that wraps around would call the hottest group the coldest."""
    with pytest.raises(PlacementError, match="divide them"):
        group_neurons([np.full(4, 2**62, dtype=np.int64)])


def test_parallel_block_without_ffn_norm_has_units():
    shape = replace(LLAMA_7B, separate_ffn_norm=False, parallel_block=True)
    difference = unit_bytes(LLAMA_7B, "float32", 1, 1).attention[0] - unit_bytes(shape, "float32", 1, 1).attention[0]
    assert difference == 4096 * 4


def test_predictors_in_a_type_of_their_own() -> None:
    """Predictors counted in the model's type where they are kept in a smaller one."""
    both, own = (unit_bytes(LLAMA_7B, "float16", 512, 1, [512] * 32, dtype) for dtype in ("float16", "q8_0"))
    assert own.predictor == unit_bytes(LLAMA_7B, "q8_0", 512, 1, [512] * 32).predictor
    assert own.predictor < both.predictor and own.attention == both.attention and own.neuron == both.neuron
