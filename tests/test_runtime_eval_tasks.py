"""Multiple-choice questions: how they are read, that likelihoods are the model's, and the same through lm-eval."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import GenerationError, TaskError
from pi_toolkit.profiler.token_windows import load_tokenizer
from pi_toolkit.runtime.engine import Engine, EngineOptions, open_engine
from pi_toolkit.runtime.eval_cli import main as pi_eval
from pi_toolkit.runtime.eval_likelihood import Pair, encode_pair, log_likelihoods, shortened
from pi_toolkit.runtime.eval_tasks import Question, answer, encode_questions, read_questions
from pi_toolkit.runtime.generate import generate
from pi_toolkit.runtime.sampling import Sampler, SamplingOptions
from test_runtime_cli import make_workspace, write_predictors
from tiny_models import DEMO_MODELS

CONTEXT = 64
QUESTIONS = [
    {
        "goal": f"How do you {verb} the {noun}?",
        "sol1": f"Take the {noun} away.",
        "sol2": f"{verb} it slowly",
        "label": i % 2,
    }
    for i, (verb, noun) in enumerate([("open", "door"), ("sharpen", "pencil"), ("cook", "rice"), ("paint", "wall")] * 3)
]
needs_lm_eval = "lm-eval, which is in the extra 'eval', is not installed"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    workspace = make_workspace(tmp_path_factory.mktemp("tasks"), "llama", "tiny")
    write_predictors(workspace)
    return open_engine(workspace, EngineOptions(mode="predicted", device="cpu", slots=3, context=CONTEXT))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO_MODELS / "relu-llama-5m")


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_both_forms_of_a_question(tmp_path: Path) -> None:
    """PIQA put into other words than lm-eval's, whose figures could then not be compared."""
    general = {"context": "2 + 2 =", "choices": ["4", "5", "six"], "label": "0"}
    found = read_questions(write_lines(tmp_path / "q.jsonl", QUESTIONS[1], "", general))
    assert found == [
        Question(
            "Question: How do you sharpen the pencil?\nAnswer:",
            ("Take the pencil away.", "sharpen it slowly"),
            1,
        ),
        Question("2 + 2 =", ("4", "5", "six"), 0),
    ]
    assert len(read_questions(write_lines(tmp_path / "q.jsonl", *QUESTIONS), limit=5)) == 5


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "is no object"),
        ({"context": "a", "label": 0}, "lacks fields"),
        ({"context": 1, "choices": ["a", "b"], "label": 0}, "a context that is no text"),
        ({"goal": None, "sol1": "a", "sol2": "b", "label": 0}, "a context that is no text"),
        ({"context": "a", "choices": "ab", "label": 0}, "no list of two or more choices"),
        ({"context": "a", "choices": ["a"], "label": 0}, "no list of two or more choices"),
        ({"context": "a", "choices": ["a", " "], "label": 0}, "no list of two or more choices"),
        ({"goal": "a", "sol1": "b", "sol2": 3, "label": 0}, "no list of two or more choices"),
        ({"context": "a", "choices": ["a", "b"]}, "has the label None"),
        (
            {"context": "a", "choices": ["a", "b"], "label": 2},
            "has the label 2: give the index of one of its 2 choices",
        ),
        ({"context": "a", "choices": ["a", "b"], "label": -1}, "has the label -1"),
        ({"context": "a", "choices": ["a", "b"], "label": True}, "has the label True"),
        ({"context": "a", "choices": ["a", "b"], "label": "²"}, "has the label '²'"),
        ({"context": "a", "choices": ["a", "\ud800"], "label": 0}, "not valid Unicode"),
    ],
)
def test_malformed_lines(tmp_path: Path, row: Any, sentence: str) -> None:
    """A traceback, or a question that is answered at random."""
    path = write_lines(tmp_path / "q.jsonl", QUESTIONS[0], row)
    with pytest.raises(TaskError) as raised:
        read_questions(path)
    assert sentence in raised.value.message and raised.value.message.startswith(f"line 2 of {str(path)!r} ")


def test_a_file_without_questions(tmp_path: Path) -> None:
    """An accuracy of nothing."""
    with pytest.raises(TaskError, match="holds no question: give a file with"):
        read_questions(write_lines(tmp_path / "q.jsonl", "", "  "))


def test_contexts_and_continuations_become_tokens_together(tokenizer: Any) -> None:
    """A continuation that is split from its context within a word, or that lacks its space."""
    for context, continuation in (("The city of", " Paris"), ("The city of ", "Paris"), ("One line\n", "and another")):
        pair = encode_pair(tokenizer, context, continuation)
        assert pair.context + pair.continuation == tokenizer(context + continuation)["input_ids"]
        assert pair.context == tokenizer(context.rstrip())["input_ids"]
        assert tokenizer.decode(pair.continuation).strip() == continuation.strip()
    bos = tokenizer.bos_token_id
    alone = encode_pair(tokenizer, "", "Paris")
    assert alone.context == [bos] and alone.continuation == tokenizer("Paris", add_special_tokens=False)["input_ids"]
    assert encode_pair(tokenizer, "", "<s>Paris") == alone
    assert encode_pair(tokenizer, "<s>The city of", " Paris") == encode_pair(tokenizer, "The city of", " Paris")


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_likelihoods_are_those_of_transformers(engine: Engine, mode: Any) -> None:
    """Padding that is seen, rows that are mixed up, or logits of the wrong positions."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 1), (20, 3), (5, 9), (40, 1), (7, 7), (60, 8), (200, 4)]
    pairs = [Pair(*(torch.randint(0, 4096, (size,), generator=generator).tolist() for size in both)) for both in sizes]
    model = transformers.AutoModelForCausalLM.from_pretrained(engine.record.model, dtype=torch.float32).eval()
    engine.decoder.mode = mode
    done: list[int] = []
    for pair, found in zip(pairs, log_likelihoods(engine.decoder, pairs, done.append), strict=True):
        ids = torch.tensor([(pair.context + pair.continuation)[-CONTEXT - 1 :]])
        with torch.inference_mode():
            shares = model(ids[:, :-1]).logits[0].log_softmax(dim=-1)[-len(pair.continuation) :]
        wanted = sum(float(shares[row, token]) for row, token in enumerate(pair.continuation))
        assert found.log_probability == pytest.approx(wanted, abs=1e-3)
        assert found.is_greedy == (shares.argmax(dim=-1).tolist() == pair.continuation)
    assert sum(done) == len(pairs)


def test_what_greedy_decoding_writes_is_greedy(engine: Engine) -> None:
    """A flag that is never set."""
    engine.decoder.mode = "predicted"
    prompt = [3, 4, 5]
    text = generate(engine.decoder, prompt, 6, Sampler(SamplingOptions())).token_ids
    right, wrong = log_likelihoods(engine.decoder, [Pair(prompt, text), Pair(prompt, [*text[:-1], text[-1] ^ 1])])
    assert right.is_greedy and not wrong.is_greedy


@pytest.mark.parametrize("continuation", [[], list(range(CONTEXT + 1))])
def test_continuations_that_do_not_fit(engine: Engine, continuation: list[int]) -> None:
    """The likelihood of a part of a choice taken for that of the whole."""
    with pytest.raises(GenerationError, match="none longer than the context"):
        log_likelihoods(engine.decoder, [Pair([1], continuation)])


def test_the_end_of_a_continuation_that_does_not_fit(engine: Engine) -> None:
    """A harness that hands over continuations one by one, and whose whole run ended at one that is too long."""
    engine.decoder.mode = "dense"
    ids = [int(number) for number in torch.randint(3, 200, (CONTEXT + 9,), generator=torch.manual_seed(0))]
    assert shortened(Pair([1], ids[:CONTEXT]), CONTEXT) == Pair([1], ids[:CONTEXT])
    end = shortened(Pair([1], ids), CONTEXT)
    assert end == Pair([ids[8]], ids[9:])
    assert log_likelihoods(engine.decoder, [end])[0].log_probability < 0


def test_questions_with_a_choice_that_does_not_fit_are_left_out(
    tmp_path: Path, engine: Engine, run_json: Any, run: Any, refuses: Any
) -> None:
    """A long run that ends at one odd line, or a choice that wins because only its end was scored."""
    long = {"context": "a", "choices": ["b", "the river " * CONTEXT], "label": 1}
    mixed = write_lines(tmp_path / "mixed.jsonl", QUESTIONS[0], long, QUESTIONS[1])
    plain = write_lines(tmp_path / "plain.jsonl", *QUESTIONS[:2])
    given = [make_workspace(tmp_path, "llama", "tiny").path, "--mode", "dense", "--ctx", CONTEXT, "--tasks"]
    found, without = (run_json(pi_eval, *given, file)["tasks"][str(file)]["dense"] for file in (mixed, plain))
    assert found == without | {"left_out": 1} and without["left_out"] == 0
    said = run(pi_eval, *given, mixed).stderr
    assert f"1 of 3 questions of mixed.jsonl have a choice longer than the context of {CONTEXT} tokens" in said
    assert "raise --ctx" in refuses(pi_eval, *given, write_lines(tmp_path / "long.jsonl", long))


def test_accuracy_counts_right_answers(engine: Engine) -> None:
    """A figure that prefers long choices, or short ones, in both columns."""
    engine.decoder.mode = "dense"
    questions = [
        Question("The city", ("of Paris", "was the second of the very long list of"), label) for label in (0, 1)
    ]
    encoded = encode_questions(questions, engine.tokenizer)
    assert answer(engine.decoder, questions, encoded).accuracy == 0.5
    short, long = (likelihood.log_probability for likelihood in log_likelihoods(engine.decoder, encoded[0]))
    first = answer(engine.decoder, questions[:1], encoded[:1])
    assert first.accuracy == (short >= long)
    lengths = [len(choice) for choice in questions[0].choices]
    assert first.normalised == (short / lengths[0] >= long / lengths[1])
    assert answer(engine.decoder, questions, encoded).error == pytest.approx(0.5)


def test_lm_eval_gives_the_same_figures(engine: Engine, tmp_path: Path) -> None:
    """A model class that answers lm-eval differently than ourselves; a local task that needs the network."""
    pytest.importorskip("lm_eval", reason=needs_lm_eval)
    from pi_toolkit.runtime.eval_lm import run_tasks

    file = write_lines(tmp_path / "piqa.jsonl", *QUESTIONS)
    task = {
        "task": "local_piqa",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(file)}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "Question: {{goal}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "{{[sol1, sol2]}}",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }
    recipe = tmp_path / "local_piqa.yaml"
    recipe.write_text(json.dumps(task))  # JSON is YAML
    results = run_tasks(engine, ["dense", "predicted"], [str(recipe)], None, None)["local_piqa"]
    questions = read_questions(file)
    encoded = encode_questions(questions, engine.tokenizer)
    for mode in ("dense", "predicted"):
        engine.decoder.mode = mode
        mine = answer(engine.decoder, questions, encoded)
        assert (results[mode]["acc"], results[mode]["acc_norm"]) == (mine.accuracy, mine.normalised)


def test_lm_eval_refuses_an_unknown_task(engine: Engine) -> None:
    """A traceback out of another library."""
    pytest.importorskip("lm_eval", reason=needs_lm_eval)
    from pi_toolkit.runtime.eval_lm import run_tasks

    with pytest.raises(TaskError, match="lm-eval cannot run no_such_task"):
        run_tasks(engine, ["dense"], ["no_such_task"], 1, None)


def test_the_registered_model(engine: Engine) -> None:
    """Rolling likelihoods that leave tokens out, texts that run past where they are to stop."""
    pytest.importorskip("lm_eval", reason=needs_lm_eval)
    from lm_eval.api.registry import get_model

    from pi_toolkit.runtime import eval_lm

    model: Any = get_model("powerinfer-toolkit")(engine=engine)
    assert isinstance(model, eval_lm.PowerInferLM) and model.max_length == CONTEXT
    engine.decoder.mode = "dense"
    text = "The city of Paris lies on the river, and " * 8
    ids = engine.tokenizer(text)["input_ids"]
    assert len(ids) > CONTEXT
    bos, wanted, first = engine.tokenizer.bos_token_id, 0.0, 0
    hf = transformers.AutoModelForCausalLM.from_pretrained(engine.record.model, dtype=torch.float32).eval()
    while first < len(ids):  # each token once, behind as many as fit
        end = min(first + CONTEXT, len(ids))
        window = ([bos, *ids])[max(0, end - CONTEXT) : end + 1]
        with torch.inference_mode():
            shares = hf(torch.tensor([window[:-1]])).logits[0].log_softmax(dim=-1)
        for position in range(len(window) - 1 - (end - first), len(window) - 1):
            wanted += float(shares[position, window[position + 1]])
        first = end
    (rolling,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    assert rolling == pytest.approx(wanted, rel=1e-4)
    whole, cut = model.generate_until(
        [SimpleNamespace(args=("The city", {"until": until, "max_gen_toks": 12})) for until in ([], ["e"])]
    )
    assert whole and cut == whole.split("e")[0]
    with pytest.raises(TaskError, match="raise --ctx"):
        model.generate_until([SimpleNamespace(args=("The city", {"max_gen_toks": CONTEXT}))])


def test_a_model_opened_by_lm_eval(engine: Engine) -> None:
    """Arguments of lm-eval's command line that do not reach the engine."""
    pytest.importorskip("lm_eval", reason=needs_lm_eval)
    from lm_eval.api.registry import get_model

    workspace = Path(engine.record.model).with_name("tiny-pi")
    model = get_model("powerinfer-toolkit").create_from_arg_string(
        f"workspace={workspace},mode=exact,context=32", {"batch_size": 2, "max_batch_size": None, "device": "cpu"}
    )
    assert (model._decoder.mode, model.max_length, len(model._decoder.cache.keys[0])) == ("exact", 32, 2)
    assert Checkpoint(Path(engine.record.model)).shape == model._decoder.shape
