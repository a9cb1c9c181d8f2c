"""llama.cpp computes from our dense files what ``transformers`` computes from the original directories.

Runs where ``xllamacpp`` is installed (extra ``bench``) and is skipped elsewhere.
"""

from pathlib import Path

import pytest
import torch
import transformers

from gguf_cases import source_of
from pi_toolkit.profiler.gguf_container import TensorType
from pi_toolkit.profiler.token_windows import load_tokenizer
from pi_toolkit.runtime.model_gguf_export import export
from tiny_models import save_family

xllamacpp = pytest.importorskip("xllamacpp", reason="install the extra bench to compare with llama.cpp")

SIZES = dict(hidden_size=128, num_attention_heads=4, max_position_embeddings=512)
# Activations that llama.cpp runs these architectures with, and widths of whole blocks.
CASES = {
    "llama": dict(hidden_act="silu", intermediate_size=256),
    "falcon-7b": dict(activation="gelu", ffn_hidden_size=512),
    "falcon-40b": dict(activation="gelu", ffn_hidden_size=512, num_kv_heads=2),
}
PROMPTS = (" the", "The city of Paris", "The city of Paris is the capital of France, and 2,148,271 people live in it.")


def first_tokens(path: Path, prompt: str) -> tuple[int, dict[int, float]]:
    """Tokens llama.cpp makes of *prompt*, and the log-probabilities of the eight likeliest next ones."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.warmup = str(path), 256, False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "logprobs": 8}
    answer = server.handle_completions(request)
    content = answer["choices"][0]["logprobs"]["content"]
    return answer["usage"]["prompt_tokens"], {e["id"]: e["logprob"] for e in content[0]["top_logprobs"]}


@pytest.mark.parametrize(("kind", "bound"), [("F32", 0.005), ("F16", 0.01), ("Q8_0", 0.1)])
@pytest.mark.parametrize("family", list(CASES))
def test_next_tokens(family, kind, bound, tmp_path):
    """Rows of query and key in our order, another BOS, a norm for the other branch: a fluent file and another model."""
    directory = save_family(tmp_path / "hf", family, **SIZES, **CASES[family])
    path = tmp_path / "x.gguf"
    export(path, "GGUF", source_of(directory), TensorType[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(directory)
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        count, found = first_tokens(path, prompt)
        assert count == len(ids)
        assert found
        for token, logprob in found.items():
            assert logprob == pytest.approx(wanted[token].item(), abs=bound)
