"""pi-profile as a user meets it: what it writes, what it prints, and one sentence for every way it can fail."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pi_toolkit.profiler.cli import main
from pi_toolkit.profiler.workspace import Workspace, read_model
from tiny_corpus import WORDS
from tiny_models import save_family

RunJson = Callable[..., dict[str, Any]]
Refuses = Callable[..., str]
FILES = {"activation_0.pt", "activation_1.pt", "activation_2.pt", "profile.json", "locality.png", "report.html"}


def everything_below(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*")}


def test_result_and_files(tmp_path: Path, model: Path, corpus: Path, run_json: RunJson) -> None:
    """Prevents a change of what scripts read from the last line, or of what the next commands read from the disk."""
    out = tmp_path / "new" / "pi"
    result = run_json(main, model, "--corpus", corpus, "--tokens", "0.5k", "--window", "32", "-o", out)
    assert list(result) == [
        "tokens",
        "layers",
        "firing_share",
        "share_for_80_percent",
        "share_for_80_percent_model",
        "convergence",
        "comparison",
        "tokens_per_second",
        "workspace",
    ]
    assert (result["tokens"], result["layers"], result["workspace"]) == (500, 3, str(out))
    assert len(result["firing_share"]) == len(result["share_for_80_percent"]) == 3
    assert all(0 < share < 1 for share in result["firing_share"] + result["share_for_80_percent"])
    assert result["tokens_per_second"] > 0
    assert everything_below(out) == {"model.json", "activation", *(f"activation/{name}" for name in FILES)}
    about = json.loads((out / "activation" / "profile.json").read_text())
    assert about["fingerprint"] == read_model(Workspace(out)).fingerprint
    assert (about["corpus"], about["window"], about["dtype"]) == ("corpus.txt", 32, "float32")
    assert about["firing_share"] == result["firing_share"]


def test_result_is_on_stdout_and_the_rest_on_stderr(
    tmp_path: Path, model: Path, corpus: Path, run: Callable[..., Any]
) -> None:
    """Prevents progress from being piped into a file with the table."""
    result = run(main, model, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert result.exit_code == 0
    assert "of the model's FFN neurons carry 80 % of its firings" in result.stdout
    assert "100 tokens at" in result.stdout
    assert result.stderr.splitlines() == ["profiling tiny_llama on cpu in float32"]


def test_same_input_gives_identical_files(tmp_path: Path, model: Path, corpus: Path, run_json: RunJson) -> None:
    """Prevents results that cannot be reproduced, also with another batch size."""
    for name, batch_size in (("first", 8), ("second", 8), ("third", 1)):
        arguments = ("--corpus", corpus, "--tokens", "700", "--window", "16", "--batch-size", batch_size)
        run_json(main, model, *arguments, "-o", tmp_path / name)
    for file in ("model.json", *(f"activation/{name}" for name in FILES)):
        contents = [(tmp_path / name / file).read_bytes() for name in ("first", "second", "third")]
        assert contents[0] == contents[1] == contents[2], file


@pytest.mark.parametrize("name", ["a b", "a;b", "été", "$(id)", "-x"])
def test_model_and_corpus_names_are_taken_literally(
    tmp_path: Path, corpus: Path, run_json: RunJson, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Prevents quoting mistakes anywhere between the command line and the files, and weights only read as safetensors."""
    directory = save_family(tmp_path / name, "opt")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    text = shutil.copy(corpus, tmp_path / f"{name}.txt")
    monkeypatch.chdir(tmp_path)
    result = run_json(main, "--corpus", text, "--tokens", "100", f"./{name}")
    assert result["workspace"] == f"{name}-pi"
    assert read_model(Workspace(tmp_path / f"{name}-pi")).model == str(directory)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_counts_nearly_the_same(
    tmp_path: Path, model: Path, corpus: Path, run_json: RunJson, dtype: str
) -> None:
    """Prevents --dtype from being ignored, or from changing what a firing is."""
    arguments = (model, "--corpus", corpus, "--tokens", "300")
    full = run_json(main, *arguments, "-o", tmp_path / "full")
    half = run_json(main, *arguments, "--dtype", dtype, "-o", tmp_path / "half")
    assert half["firing_share"] == pytest.approx(full["firing_share"], rel=0.02)
    assert json.loads((tmp_path / "half" / "activation" / "profile.json").read_text())["dtype"] == dtype


def test_second_run_replaces_the_counts(tmp_path: Path, model: Path, corpus: Path, run_json: RunJson) -> None:
    """Prevents counts of two runs from being mixed, and the other stages' files from being lost."""
    for tokens in (300, 200):
        result = run_json(main, model, "--corpus", corpus, "--tokens", tokens, "-o", tmp_path / "pi")
        (tmp_path / "pi" / "mine.gpuidx").touch()
    assert result["tokens"] == 200
    assert json.loads((tmp_path / "pi" / "activation" / "profile.json").read_text())["tokens"] == 200
    assert (tmp_path / "pi" / "mine.gpuidx").exists()


def test_default_workspace_is_named_after_the_model(
    tmp_path: Path, model: Path, corpus: Path, run_json: RunJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents output in the model's own directory, which may be shared or read-only."""
    monkeypatch.chdir(tmp_path)
    result = run_json(main, model, "--corpus", corpus, "--tokens", "100")
    assert result["workspace"] == "tiny_llama-pi"
    assert (tmp_path / "tiny_llama-pi" / "model.json").exists()


def test_corpus_that_ends_early_is_announced(
    tmp_path: Path, model: Path, corpus: Path, run: Callable[..., Any]
) -> None:
    """Prevents a profile over far fewer tokens than asked for from going unnoticed."""
    result = run(main, model, "--corpus", corpus, "--tokens", "1M", "-o", tmp_path / "pi")
    assert result.exit_code == 0
    counted = json.loads((tmp_path / "pi" / "activation" / "profile.json").read_text())["tokens"]
    assert f"the corpus ended after {counted:,} of 1,000,000 tokens" in result.stderr


# Arguments, in which {tmp}, {model} and {corpus} stand for paths, and the sentence they end in.
REFUSALS: dict[str, tuple[str, str]] = {
    "missing model": ("{tmp}/nowhere --corpus {corpus}", "neither a directory nor a valid hub id"),
    "model is a file": ("{model}/model.safetensors --corpus {corpus}", "is a file: give the model's directory"),
    "directory is no model": ("{tmp} --corpus {corpus}", "has no config.json"),
    "out below a file": ("{model} --corpus {corpus} -o {tmp}/file/pi", "choose another output with -o"),
    "out is a file": ("{model} --corpus {corpus} -o {tmp}/file", "choose another output with -o"),
    "empty corpus": ("{model} --corpus {tmp}/empty.txt", "holds no text outside its held-out documents"),
    "held-out only": ("{model} --corpus {tmp}/one.txt", "holds no text outside its held-out documents"),
    "missing corpus": ("{model} --corpus {tmp}/c.txt", "is neither a file nor one of wikipedia"),
    "wrong suffix": ("{model} --corpus {tmp}/file", "give a .txt, .jsonl or .parquet file"),
    "window too long": ("{model} --corpus {corpus} --window 129", "--window 129 is beyond the model's 128 positions"),
    "no such device": ("{model} --corpus {corpus} --device tpu", "is not a device: use auto, cpu, cuda or cuda:1"),
    "unusable device": ("{model} --corpus {corpus} --device meta", "is not supported: use auto, cpu, cuda"),
    "unknown home": ("~nosuchuser/x --corpus {corpus}", "give the path in full"),
    "unnamed corpus": ("{model} --corpus=", "the name of the corpus is empty: give wikipedia"),
    "counts are a file": ("{model} --corpus {corpus} -o {tmp}/taken", "is no regular directory: move it away"),
    "absent GPU": ("{model} --corpus {corpus} --device cuda:99", "CUDA devices found): use --device cpu"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_leaves_nothing_behind(tmp_path: Path, model: Path, corpus: Path, refuses: Refuses, case: str) -> None:
    """Prevents tracebacks and half-made workspaces from ordinary mistakes."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "one.txt").write_text("one document, which is the one that is held out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "activation").touch()
    template, sentence = REFUSALS[case]
    arguments = [part.format(tmp=tmp_path, model=model, corpus=corpus) for part in template.split()]
    out = [] if "-o" in arguments else ["-o", tmp_path / "pi"]
    before = everything_below(tmp_path)
    assert sentence in refuses(main, *arguments, *out)
    assert everything_below(tmp_path) == before


def test_smooth_model_is_refused_with_the_measured_share(tmp_path: Path, corpus: Path, refuses: Refuses) -> None:
    """Prevents a SiLU model from getting a workspace that promises a speed-up."""
    smooth = save_family(tmp_path / "model", "llama", hidden_act="silu")
    message = refuses(main, smooth, "--corpus", corpus, "--tokens", "500", "-o", tmp_path / "pi")
    assert "activation is 'silu' and 0.0" in message
    assert not (tmp_path / "pi").exists()


def test_workspace_of_another_model_is_left_alone(
    tmp_path: Path, corpus: Path, profiled: Path, refuses: Refuses
) -> None:
    """Prevents one model's counts from replacing another's under the same name."""
    shutil.copytree(profiled, tmp_path / "pi")
    before = {file: file.read_bytes() for file in (tmp_path / "pi").rglob("*") if file.is_file()}
    other = save_family(tmp_path / "other", "llama", seed=1)
    message = refuses(main, other, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert message.endswith("already belongs to another model: choose another workspace with -o")
    assert {file: file.read_bytes() for file in (tmp_path / "pi").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    "stage",
    [
        "whole_model.load_hf_model",
        "whole_model.verify_activation",
        "profile_result.locality_figure",
        "activation_stats.write",
    ],
)
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (KeyboardInterrupt(), "no output was changed, run the command again"),
        (OSError(28, "No space left on device"), "No space left on device: check that the path is readable"),
        (MemoryError(), "out of memory: lower --batch-size or --window or --tokens, or use --dtype bfloat16"),
        (OSError(12, "Cannot allocate memory"), "out of memory: lower --batch-size"),
        (RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"), "out of memory: lower --batch-size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out of memory: lower"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB."), "out of memory: lower"),
    ],
    ids=["Ctrl-C", "full disk", "memory", "system's memory", "mapped memory", "CPU memory", "GPU memory"],
)
def test_interruption_in_any_stage_keeps_the_old_counts(
    tmp_path: Path,
    model: Path,
    corpus: Path,
    profiled: Path,
    refuses: Refuses,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: BaseException,
    remedy: str,
) -> None:
    """Prevents Ctrl-C, a full disk or exhausted memory from ending in a traceback or costing the last good profile."""

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise error

    arguments = (model, "--corpus", corpus, "--tokens", "100")
    shutil.copytree(profiled, tmp_path / "old")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(f"pi_toolkit.profiler.{stage}", fail)
    for out in ("old", "new"):
        assert remedy in refuses(main, *arguments, "-o", tmp_path / out)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_workspace_that_cannot_be_read_is_left_alone(
    tmp_path: Path, model: Path, corpus: Path, refuses: Refuses
) -> None:
    """Prevents the advice to run pi-profile from pi-profile itself, and overwriting what may be another model's."""
    (tmp_path / "pi").mkdir()
    (tmp_path / "pi" / "model.json").write_text("{")
    message = refuses(main, model, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert message.endswith(": choose another workspace with -o, or remove that file")
    assert (tmp_path / "pi" / "model.json").read_text() == "{"


def test_reader_that_went_away_is_no_error_message(tmp_path: Path, model: Path, corpus: Path) -> None:
    """Prevents ``pi-profile … | head -1`` from ending in advice about disks."""
    code = "from pi_toolkit.profiler.cli import main; main()"
    command = [sys.executable, "-c", code, str(model), "--corpus", str(corpus), "--tokens", "100"]
    with subprocess.Popen(
        [*command, "-o", str(tmp_path / "pi")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        message = process.stderr.read()
    assert message == "profiling tiny_llama on cpu in float32\n"


def test_own_mistake_keeps_its_traceback(
    tmp_path: Path, model: Path, corpus: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a bug from being reported as a lack of memory or of disk."""

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("size of tensor a must match")

    monkeypatch.setattr("pi_toolkit.profiler.whole_model.verify_activation", fail)
    result = run(main, model, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("limit", [4, 30])
def test_output_that_does_not_fit_is_one_sentence(tmp_path: Path, model: Path, corpus: Path, limit: int) -> None:
    """Prevents torch's page of C++ for a full disk, here a limit in KiB on files, and a half-made workspace."""
    code = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit} * 1024,) * 2)\n"
        "from pi_toolkit.profiler.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, str(model), "--corpus", str(corpus), "--tokens", "100"]
    result = subprocess.run([*command, "-o", str(tmp_path / "pi")], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("Error: File too large"), result.stderr
    assert "Traceback" not in result.stderr
    assert everything_below(tmp_path) == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_real_interrupt_is_one_sentence(tmp_path: Path, model: Path, number: int) -> None:
    """Prevents what only a real process shows: Ctrl-C swallowed by a library, a traceback, or exit code 130."""
    endless = tmp_path / "endless.txt"
    endless.write_text("\n\n".join([" ".join(WORDS)] * 200_000))
    code = "from pi_toolkit.profiler.cli import main; main()"  # what the console script holds
    command = [sys.executable, "-c", code, str(model), "--corpus", str(endless), "--tokens", "1G"]
    with subprocess.Popen([*command, "-o", str(tmp_path / "pi")], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("profiling"):
                break
        time.sleep(1)
        process.send_signal(number)
        message = process.stderr.read()
    assert process.returncode == 1
    assert message.strip() == "Error: interrupted before the end: no output was changed, run the command again"
    assert everything_below(tmp_path) == {"endless.txt"}
