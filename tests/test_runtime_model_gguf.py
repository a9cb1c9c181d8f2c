"""Model files of every family and kind hold the model they were made from, and run to the same text."""

import numpy as np
import pytest
import torch

from gguf_cases import export_family, source_of
from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.errors import GgufError, UnsupportedModelError
from pi_toolkit.profiler.gguf_container import KeyValue, TensorType, ValueType
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.model_gguf_layout import interleaved_rows
from pi_toolkit.profiler.quantisation import QuantisedMatrix, dense
from pi_toolkit.profiler.workspace import Workspace, describe, open_weights, write_model
from pi_toolkit.runtime.engine import EngineOptions, open_engine
from pi_toolkit.runtime.generate import generate
from pi_toolkit.runtime.model_gguf_export import ExportSource, export
from pi_toolkit.runtime.sampling import Sampler, SamplingOptions
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, PROSPARSE_THRESHOLD, save_family

F32, F16, BF16, Q4_0, Q8_0 = (TensorType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q8_0"))
MAGICS = ("PWRI", "GGUF")


def all_weights(model) -> dict[str, torch.Tensor | QuantisedMatrix]:
    """Every tensor of a checkpoint or model file by role."""
    shape = model.shape
    weights = {role: model.shared(role) for role in shape.shared_shapes()}
    for layer in range(shape.num_layers):
        tensors = model.attention(layer) | {r: model.layer(layer, r) for r in shape.ffn_shapes(layer)}
        weights |= {f"{layer}.{role}": tensor for role, tensor in tensors.items()}
        rows = [role for role in ("gate.weight", "up.weight", "down.weight") if role in tensors]
        weights |= {f"{layer}.rows of {role}": model.neuron_rows(layer, role) for role in rows}
    return weights


@pytest.mark.parametrize("kind", [F32, BF16, F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_tensor_comes_back(family, magic, kind, tmp_path):
    """A permutation, transposition or fused matrix that is undone otherwise than it was done, or a forgotten tensor."""
    source, path = export_family(tmp_path, family, magic, kind)
    model = GgufModel(path)
    wanted, found = all_weights(source.model), all_weights(model)
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[kind]
    for role, tensor in wanted.items():
        stored = tensor.to(dtype) if tensor.ndim == 2 else tensor
        assert torch.equal(found[role].float(), stored.float()), role
    assert model.dtype() == dtype
    assert model.fingerprint() == source.fingerprint
    assert model.name == "tiny"
    tied = source.model.shape.tied_embeddings and (magic == "GGUF" or family == "opt")
    assert vars(model.shape) == vars(source.model.shape) | {"tied_embeddings": tied}
    if magic == "PWRI":
        assert model.threshold == source.predictors.threshold
        for layer in range(model.num_predictors):
            mlp = source.predictors.layers[layer]
            for mine, theirs in zip(model.predictor(layer), (mlp.fc1, mlp.fc2), strict=True):
                assert torch.equal(mine.float(), theirs.to(dtype).float())


@pytest.mark.parametrize("kind", [Q4_0, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_quantised_files_hold_nearly_the_same(family, magic, kind, tmp_path):
    """Rows in the wrong order, or blocks along the wrong axis, in a file whose values cannot be compared exactly."""
    source, path = export_family(tmp_path, family, magic, kind)
    model = GgufModel(path)
    found = all_weights(model)
    for role, tensor in all_weights(source.model).items():
        bound = 0.12 if kind == Q4_0 else 0.01
        error = (dense(found[role]).float() - tensor.float()).norm() / tensor.float().norm()
        assert error <= (bound if tensor.ndim == 2 else 0), role
    assert isinstance(model.layer(0, "up.weight"), QuantisedMatrix)
    assert isinstance(model.neuron_rows(0, "down.weight"), QuantisedMatrix) == (magic == "PWRI")
    assert model.quantised_kind() == kind.name.lower()


def greedy(engine, length=24) -> list[int]:
    sampler = Sampler(SamplingOptions())
    return generate(engine.decoder, [0, 5, 77, 1234, 9], length, sampler, frozenset()).token_ids


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "float32"), (F16, "float16"), (BF16, "bfloat16")])
@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_file_runs_to_the_text_of_its_original(family, magic, kind, dtype, tmp_path):
    """A file that holds the right tensors and another model: epsilon, rotary base, window, positions, heads."""
    _, path = export_family(tmp_path, family, magic, kind)
    options = EngineOptions(mode="dense", device="cpu", dtype=dtype, context=64)
    workspace = Workspace(tmp_path / "ws")
    directory = str(tmp_path / "hf")
    write_model(workspace, describe(directory, None, open_weights(directory, None)))
    assert greedy(open_engine(Workspace(path), options)) == greedy(open_engine(workspace, options))


def test_predicted_is_the_default_where_predictors_are(tmp_path):
    """Predictors inside a file that nothing reads."""
    _, sparse = export_family(tmp_path, "llama", "PWRI", F16)
    options = EngineOptions(device="cpu", dtype="float32", context=32)
    engine = open_engine(Workspace(sparse), options)
    assert engine.decoder.mode == "predicted"
    assert engine.tokenizer("The city")["input_ids"]
    assert engine.end_ids


@pytest.mark.parametrize("kind", [Q4_0, Q8_0], ids=lambda kind: kind.name)
def test_quantised_files_run(kind, tmp_path):
    """Blocks that the runtime was never given."""
    _, path = export_family(tmp_path, "llama", "PWRI", kind)
    for mode in ("dense", "exact", "predicted"):
        engine = open_engine(Workspace(path), EngineOptions(mode=mode, device="cpu", context=32))
        assert len(greedy(engine, 8)) == 8


def test_layers_of_different_widths(tmp_path):
    """A shape with one number for all layers, where the key is a list."""
    _, path = export_family(tmp_path, "llama", "PWRI", F16)
    model = GgufModel(path)
    assert model.shape.ffn_sizes == (96, 96, 96)
    file = gguf_container.read(path, "PWRI")
    keys = [item for item in file.key_values.values() if not item.name.endswith("feed_forward_length")]
    keys.append(gguf_container.KeyValue("llama.feed_forward_length", ValueType.ARRAY, [96, 96, 96], ValueType.U32))
    again = tmp_path / "again.powerinfer.gguf"
    gguf_container.write(again, "PWRI", keys, list(file.tensors.values()), [file.data(name) for name in file.tensors])
    assert GgufModel(again).shape.ffn_sizes == (96, 96, 96)


def test_interleaved_rows_of_one_head():
    """llama.cpp rotates neighbours, checkpoints rotate halves."""
    from pi_toolkit.profiler.model_families import read_shape

    config = dict(model_type="llama", hidden_size=8, num_attention_heads=2, num_hidden_layers=1, hidden_act="relu")
    shape = read_shape(config)
    assert interleaved_rows(shape, "query.weight").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleaved_rows(shape, "value.weight") is None


def test_a_sparse_file_without_predictors_is_refused(tmp_path):
    """PowerInfer's engine would stop at a missing tensor."""
    source, _ = export_family(tmp_path, "llama", "GGUF", F16)
    bare = ExportSource(source.model, "tiny", source.fingerprint, None, source.tokenizer_keys)
    with pytest.raises(GgufError, match="would have no predictors"):
        export(tmp_path / "x.powerinfer.gguf", "PWRI", bare, F16)
    assert not (tmp_path / "x.powerinfer.gguf").exists()


def test_a_sparse_file_of_a_silu_model_is_refused(tmp_path):
    """PowerInfer's engine computes ReLU whatever the model was trained with."""
    with pytest.raises(UnsupportedModelError, match="'silu'"):
        export_family(tmp_path, "llama", "PWRI", F16, hidden_act="silu")


def test_weights_beyond_f16_are_refused_and_leave_nothing(tmp_path):
    """Infinity in place of a weight."""
    source, _ = export_family(tmp_path, "llama", "GGUF", F32)
    weight = source.model.layer(0, "up.weight")
    weight[3, 4] = 1e6
    for kind, match in ((F16, "F16 cannot hold"),):
        with pytest.raises(GgufError, match=match):
            export(tmp_path / "x.gguf", "GGUF", source, kind)
    assert not (tmp_path / "x.gguf").exists()
    assert not list(tmp_path.glob(".tmp*"))


def test_a_dense_file_says_its_activation(tmp_path, capsys):
    """llama.cpp's format cannot, so that a ReLU model would come back as SiLU."""
    _, path = export_family(tmp_path, "llama", "GGUF", F16)
    assert "llama.cpp will run this file with SiLU in place of relu" in capsys.readouterr().err
    assert GgufModel(path).shape.activation == "relu"
    file = gguf_container.read(path, "GGUF")
    keys = [item for item in file.key_values.values() if not item.name.startswith("powerinfer_toolkit.")]
    foreign = tmp_path / "foreign.gguf"
    gguf_container.write(foreign, "GGUF", keys, list(file.tensors.values()), [file.data(name) for name in file.tensors])
    assert GgufModel(foreign).shape.activation == "silu"
    assert GgufModel(foreign, "relu").shape.activation == "relu"
    assert GgufModel(foreign).stated_fingerprint is None
    assert len(GgufModel(foreign).fingerprint()) == 64


def test_other_quantised_types_are_dequantised_and_announced(tmp_path, capsys):
    """A K-quant file that cannot be profiled."""
    import gguf

    _, path = export_family(tmp_path, "llama", "GGUF", F32)
    file = gguf_container.read(path, "GGUF")
    infos, arrays = [], []
    for info in file.tensors.values():
        data = file.data(info.name)
        if info.name == "blk.1.ffn_up.weight":
            info = gguf_container.TensorInfo(info.name, info.shape, TensorType.Q4_1)
            data = gguf.quants.quantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType.Q4_1)
        infos.append(info)
        arrays.append(data)
    mixed = tmp_path / "mixed.gguf"
    gguf_container.write(mixed, "GGUF", list(file.key_values.values()), infos, arrays)
    model = GgufModel(mixed)
    model.announce_dequantised()
    assert "Q4_1 tensors are dequantised" in capsys.readouterr().err
    error = model.layer(1, "up.weight") - GgufModel(path).layer(1, "up.weight")
    assert 0 < error.abs().max() < 0.1


def test_types_that_powerinfers_quantiser_writes(tmp_path, capsys):
    """Its files other than Q4_0 have Q5_0 predictors, and wide ones a Q6_K head."""
    import gguf

    source, path = export_family(tmp_path, "llama", "PWRI", F16, hidden_size=256, num_attention_heads=8)
    file = gguf_container.read(path, "PWRI")
    infos, arrays = [], []
    for info in file.tensors.values():
        data = file.data(info.name)
        if ".fc1." in info.name or ".fc2." in info.name:
            info = gguf_container.TensorInfo(info.name, info.shape, TensorType.Q5_0)
            data = gguf.quants.quantize(data.astype(np.float32), gguf.GGMLQuantizationType.Q5_0)
        if info.name == "output.weight":
            info = gguf_container.TensorInfo(info.name, info.shape, TensorType.Q6_K)
            data = np.random.default_rng(0).integers(0, 40, (info.shape[0], info.num_bytes // info.shape[0]), np.uint8)
        infos.append(info)
        arrays.append(data)
    mixed = tmp_path / "mixed.powerinfer.gguf"
    gguf_container.write(mixed, "PWRI", list(file.key_values.values()), infos, arrays)
    engine = open_engine(Workspace(mixed), EngineOptions(device="cpu", dtype="float32", context=32))
    assert "Q5_0, Q6_K tensors are dequantised" in capsys.readouterr().err
    assert len(greedy(engine, 4)) == 4
    fc1, _ = GgufModel(mixed).predictor(0)
    assert (fc1 - source.predictors.layers[0].fc1.float()).abs().max() < 0.05


@pytest.mark.parametrize("magic", MAGICS)
def test_bamboo_files(magic, tmp_path):
    """dReLU is in no key of PowerInfer's: the architecture alone says it, and nothing here may compute it as ReLU."""
    source = source_of(save_family(tmp_path / "hf", BAMBOO))
    assert (source.model.shape.family, source.model.shape.activation) == ("bamboo", "drelu")
    path = tmp_path / ("x.powerinfer.gguf" if magic == "PWRI" else "x.gguf")
    export(path, magic, source, F32)
    model, wanted = GgufModel(path), all_weights(source.model)
    tied = source.model.shape.tied_embeddings and magic == "GGUF"
    assert vars(model.shape) == vars(source.model.shape) | {"tied_embeddings": tied}
    for role, tensor in all_weights(model).items():
        if role in wanted:
            assert torch.equal(tensor, wanted[role]), role
    name = "bamboo" if magic == "PWRI" else "powerinfer_toolkit.bamboo"
    assert model.file.value("general.architecture", ValueType.STRING) == name
    engine = open_engine(Workspace(path), EngineOptions("exact", device="cpu", dtype="float32", context=32))
    assert {tier.activation for layer in engine.decoder.weights.layers for tier in layer.ffn.tiers} == {"drelu"}
    tokens, twin = torch.arange(2, 26)[None], load_hf_model(source.model, torch.device("cpu"), torch.float32)
    states = engine.decoder.hidden_states(tokens, torch.arange(24)[None], torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(engine.decoder.logits(states), twin(tokens).logits, atol=1e-4, rtol=0)
    again = load_hf_model(model, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(again(tokens).logits, twin(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("magic", MAGICS)
def test_prosparse_files(magic, tmp_path, capsys):
    """A FATReLU threshold that is lost on the way through a file, in whose format nothing says it."""
    source = source_of(save_family(tmp_path / "hf", PROSPARSE))
    path = tmp_path / ("x.powerinfer.gguf" if magic == "PWRI" else "x.gguf")
    export(path, magic, source, F32)
    other = "PowerInfer's engine" if magic == "PWRI" else "llama.cpp"
    assert f"{other} will run this file with" in capsys.readouterr().err
    model = GgufModel(path)
    assert model.shape == source.model.shape
    assert model.fingerprint() == source.fingerprint
    engine = open_engine(Workspace(path), EngineOptions("exact", device="cpu", dtype="float32", context=32))
    tiers = [tier for layer in engine.decoder.weights.layers for tier in layer.ffn.tiers]
    assert {(tier.activation, tier.activation_threshold) for tier in tiers} == {("fatrelu", PROSPARSE_THRESHOLD)}
    tokens, twin = torch.arange(2, 26)[None], load_hf_model(source.model, torch.device("cpu"), torch.float32)
    states = engine.decoder.hidden_states(tokens, torch.arange(24)[None], torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(engine.decoder.logits(states), twin(tokens).logits, atol=1e-4, rtol=0)
    again = load_hf_model(model, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(again(tokens).logits, twin(tokens).logits, atol=1e-4, rtol=0)


def test_fatrelu_of_a_file_that_states_nothing(tmp_path):
    """ProSparse files by others, whose threshold only the user knows; a threshold that is damaged."""
    _, path = export_family(tmp_path, PROSPARSE, "GGUF", F16)
    file = gguf_container.read(path, "GGUF")
    infos, arrays = list(file.tensors.values()), [file.data(name) for name in file.tensors]
    foreign = tmp_path / "foreign.gguf"
    keys = [item for item in file.key_values.values() if not item.name.startswith("powerinfer_toolkit.")]
    gguf_container.write(foreign, "GGUF", keys, infos, arrays)
    assert GgufModel(foreign).shape.activation == "silu"
    assert GgufModel(foreign, f"fatrelu:{PROSPARSE_THRESHOLD}").shape == GgufModel(path).shape
    name = "powerinfer_toolkit.activation_threshold"
    for damaged in ([], [KeyValue(name, ValueType.F32, -1.0)], [KeyValue(name, ValueType.F32, float("nan"))]):
        keys = [item for item in file.key_values.values() if item.name != name]
        gguf_container.write(foreign, "GGUF", keys + damaged, infos, arrays)
        with pytest.raises(GgufError, match=r"activation.threshold"):
            GgufModel(foreign)


def test_fatrelu_of_another_family_is_refused(tmp_path):
    """An activation that transformers cannot build such a model with."""
    _, path = export_family(tmp_path, "falcon-7b", "GGUF", F16)
    file = gguf_container.read(path, "GGUF")
    keys = [item for item in file.key_values.values() if not item.name.startswith("powerinfer_toolkit.")]
    foreign = tmp_path / "foreign.gguf"
    gguf_container.write(foreign, "GGUF", keys, list(file.tensors.values()), [file.data(name) for name in file.tensors])
    with pytest.raises(GgufError, match="is a falcon model with fatrelu"):
        GgufModel(foreign, "fatrelu:0.1")
