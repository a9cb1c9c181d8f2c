"""``pi-profile``: from a model to a workspace with its firing counts."""

from contextlib import nullcontext
from pathlib import Path

import click

from .command_line import (
    CountType,
    ToolkitCommand,
    device_option,
    dtype_option,
    emit_json,
    json_option,
    note,
    progress_bar,
    version_option,
)
from .progress_file import MOST_SECONDS_BETWEEN, SECONDS_BETWEEN


@click.command(cls=ToolkitCommand)
@click.argument("model")
@click.option("--corpus", default="wikipedia", show_default=True, help="wikipedia, wikipedia-intros, or a file.")
@click.option("--tokens", type=CountType(), default="1M", show_default=True, help="Tokens to count on.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Windows per pass.")
@click.option("--window", type=click.IntRange(min=1), help="Tokens per window.  [default: 512, or the model's limit]")
@click.option("--revision", help="Revision of a hub model.")
@click.option(
    "--activation", help="Activation of a .gguf file that states none, as one from llama.cpp: relu, fatrelu:0.01 …"
)
@device_option
@dtype_option
@click.option(
    "--low-memory", is_flag=True, help="Hold one layer of the model at a time, for one larger than the memory."
)
@click.option("--resume", is_flag=True, help="Continue what a run with the same options left when it was killed.")
@click.option(
    "--save-every",
    type=click.FloatRange(0, MOST_SECONDS_BETWEEN),
    default=SECONDS_BETWEEN,
    show_default=True,
    help="Seconds of work that a kill may cost; 0 saves after every step.",
)
@click.option("--compare", type=click.Path(path_type=Path), help="Workspace of the same model on another corpus.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Workspace to write.  [default: ./<model name>-pi]")
@json_option
@version_option
def main(
    model: str,
    corpus: str,
    tokens: int,
    batch_size: int,
    window: int | None,
    revision: str | None,
    activation: str | None,
    device: str,
    dtype: str,
    low_memory: bool,
    resume: bool,
    save_every: float,
    compare: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Count how often each FFN neuron of MODEL fires, and start a workspace with the counts.

    MODEL is a Hugging Face directory or hub id, or a .gguf file. Several GPUs or machines share the work when torchrun
    starts python -m pi_toolkit.profiler with the same options; the counts are those of one process.

    \b
    Example:
      pi-profile facebook/opt-6.7b --tokens 1M
    """
    import torch

    from . import activation_stats
    from .atomic_write import check_writable
    from .corpus import corpus_name, documents, split_of
    from .device import check_pass_room, check_room, resolve_device, resolve_dtype
    from .layer_by_layer import LayerByLayer
    from .processes import connected, this_process
    from .profile_result import ProfileResult
    from .progress_file import ProgressFile, saved_job
    from .record import record_firings
    from .token_windows import check_window, document_windows, load_tokenizer
    from .whole_model import WholeModel
    from .window_batch import Position, halved_batches, skip
    from .workspace import Workspace, describe, model_name, open_weights, refuse_other_model
    from .workspace_lock import locked

    processes = this_process()
    workspace = Workspace(out or Path(f"{model_name(model)}-pi"))
    if processes.is_first:
        check_writable(workspace.path / "model.json", kind="file")
        check_writable(workspace.activation, kind="directory")
    checkpoint = open_weights(model, revision, activation)
    shape, record = checkpoint.shape, describe(model, revision, checkpoint)
    refuse_other_model(workspace, record)
    other = None
    if compare:
        other = activation_stats.read(Workspace(compare).activation, shape.ffn_sizes, record.fingerprint)
    window = window or min(512, shape.max_positions)
    check_window(window, shape.max_positions)
    texts = (text for i, text in enumerate(documents(corpus)) if split_of(i) != "held-out")

    torch_device = resolve_device(processes.local_device(device))
    progress_path = workspace.activation.with_name("activation.progress")
    resumed_dtype = saved_job(progress_path).get("dtype") if resume else None
    torch_dtype = resolve_dtype(dtype, torch_device, checkpoint.dtype(), shape.num_parameters(), resumed_dtype)
    dtype_name = str(torch_dtype).removeprefix("torch.")
    if processes.is_first:
        shared = f", shared by {processes.count} processes," if processes.count > 1 else ""
        note(f"profiling {record.name}{shared} on {torch_device} in {dtype_name}")
    job = {
        "fingerprint": record.fingerprint,
        "corpus": corpus_name(corpus),
        "tokens": tokens,
        "window": window,
        "dtype": dtype_name,
        "device": torch_device.type,
        "torch": torch.__version__,
    }
    with locked(workspace.activation.parent) if processes.is_first else nullcontext():
        progress_file = ProgressFile(progress_path, job, save_every)
        saved = progress_file.read() if resume else None
        tokenizer = load_tokenizer(checkpoint.directory, shape.vocabulary_size)
        windows = document_windows(texts, tokenizer, window, tokens)
        position = skip(windows, saved.position) if saved else Position()
        if resume and processes.is_first:
            begin = f"behind {position.tokens:,} tokens" if saved else "at the beginning, because no progress was saved"
            note(f"resuming {begin}")
        batches = halved_batches(windows, 1 if low_memory else batch_size, shape.vocabulary_size)
        if low_memory:
            execution: LayerByLayer | WholeModel = LayerByLayer(checkpoint, torch_device, torch_dtype, window)
        else:
            check_pass_room(shape, batch_size, window, tokens, torch_device, torch_dtype)
            check_room(shape.num_parameters() * torch_dtype.itemsize, torch_device)
            execution = WholeModel.load(checkpoint, torch_device, torch_dtype)
        with (
            connected(processes, torch_device, (job, batch_size, low_memory)),
            progress_bar("profiling", tokens, shown=processes.is_first) as progress,
        ):
            progress.advance(position.tokens)
            recording = record_firings(
                execution,
                shape,
                batches,
                progress.advance,
                processes=processes,
                progress_file=progress_file,
                saved=saved,
                position=position,
            )
        if not processes.is_first:
            return
        if recording.tokens < tokens:
            note(f"the corpus ended after {recording.tokens:,} of {tokens:,} tokens")

        stats = activation_stats.ActivationStats(
            recording.counts, record.fingerprint, recording.tokens, corpus_name(corpus), window, dtype_name
        )
        result = ProfileResult.of(recording, stats, other)
        result.write(workspace, record)
        progress_file.remove()
    result.show()
    speed = recording.new_tokens / recording.seconds
    click.echo(f"{recording.tokens:,} tokens at {speed:,.0f} tokens/s\nworkspace {workspace.path}")
    if as_json:
        emit_json(result.to_json() | {"tokens_per_second": speed, "workspace": str(workspace.path)})
