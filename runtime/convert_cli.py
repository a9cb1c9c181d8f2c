"""``pi-convert``: model files for this toolkit, PowerInfer's engine and llama.cpp."""

from pathlib import Path

import click

from pi_toolkit.profiler.command_line import (
    ToolkitCommand,
    emit_json,
    json_option,
    note,
    progress_bar,
    readable_bytes,
    version_option,
)

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


@click.command(cls=ToolkitCommand)
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="X.powerinfer.gguf, or dense X.gguf.")
@click.option("--predictor", type=click.Path(path_type=Path), help="Predictors to put in.  [default: the workspace's]")
@click.option("--activation", type=click.Path(path_type=Path), help="Counts to put beside.  [default: the workspace's]")
@click.option("--quantize", type=click.Choice(TYPES), help="Type of the matrices.  [default: f16, or a file's own]")
@click.option("--model", help="Where a workspace's weights are now, if not where pi-profile found them.")
@json_option
@version_option
def main(
    source: str,
    out: Path,
    predictor: Path | None,
    activation: Path | None,
    quantize: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Write the model of SOURCE, a workspace, a Hugging Face directory or hub id, or a .gguf file, as one file.

    X.powerinfer.gguf holds weights and predictors, with the activation counts and the placement beside it, as
    PowerInfer's engine and pi-run take them; any other X.gguf is dense, for llama.cpp and pi-run.

    \b
    Example:
      pi-convert opt-6.7b-pi -o opt-6.7b.powerinfer.gguf --quantize q4_0
    """
    from pi_toolkit.profiler.atomic_write import check_writable
    from pi_toolkit.profiler.gguf_container import Magic, TensorType

    from .convert_source import check_companions, open_source, write_companions
    from .model_gguf_export import export, own_type

    if out.suffix != ".gguf":
        raise click.BadParameter(
            f"{str(out)!r} ends in neither .powerinfer.gguf nor .gguf: name the output so", param_hint="-o"
        )
    magic: Magic = "PWRI" if out.name.endswith(".powerinfer.gguf") else "GGUF"
    if magic == "GGUF" and predictor:
        raise click.UsageError(
            "a dense file holds no predictors: name the output X.powerinfer.gguf, or drop --predictor"
        )
    check_writable(out)
    opened = open_source(source, model, predictor, activation)
    weight_type = TensorType[quantize.upper()] if quantize else own_type(opened.export.model)
    if magic == "PWRI":
        check_companions(opened, out)
    with progress_bar(
        "writing", _source_bytes(opened.export.model.shape.num_parameters(), weight_type), "bytes"
    ) as bar:
        infos = export(out, magic, opened.export, weight_type, bar.advance)
    companions = write_companions(opened, out) if magic == "PWRI" else {}
    size = out.stat().st_size
    click.echo(f"{out}: {len(infos)} tensors, {weight_type.name}, {readable_bytes(size)}")
    for kind, path in companions.items():
        note(f"{kind} beside it: {path}")
    if as_json:
        predictors = opened.export.predictors if magic == "PWRI" else None
        emit_json(
            {
                "file": str(out),
                "kind": "powerinfer" if magic == "PWRI" else "dense",
                "type": weight_type.name.lower(),
                "bytes": size,
                "tensors": len(infos),
                "fingerprint": opened.export.fingerprint,
                "sparse_threshold": predictors.threshold if predictors else None,
                **{kind: companions.get(kind) for kind in ("activation", "gpuidx")},
            }
        )


def _source_bytes(parameters: int, weight_type: object) -> int:
    """About how many bytes will be written, for the progress bar."""
    from pi_toolkit.profiler.gguf_container import BLOCKS, TensorType

    assert isinstance(weight_type, TensorType)
    values, num_bytes = BLOCKS[weight_type]
    return parameters * num_bytes // values
