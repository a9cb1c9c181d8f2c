"""The commands one after the other on a small model, then one table of what came out.

python -m pi_toolkit.runtime.demo tests/models/relu-llama-5m --workspace demo/relu-llama-5m-pi
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from pi_toolkit.profiler.command_line import ToolkitCommand, percent, print_table

CORPUS = "wikipedia-intros"
PROFILE_TOKENS, TRAINING_TOKENS, WINDOW = "300k", "400k", "256"
PROMPT, NEW_TOKENS = "The city of Paris", 60
# The model has 10 MB of BF16 weights, and with a KV cache 0.01 GiB hold about half of its neurons.
PLACEMENT_NOTE = (
    "A synchronisation of 20 µs costs as much as reading hundreds of this model's neurons of 1.5 KB, and no CUDA context "
    "fits into 0.01 GiB: the placement below leaves both out of the account."
)
PLACEMENT = ["--vram", "0.01", "--reserve", "0", "--sync-seconds", "0"]


@click.command(cls=ToolkitCommand)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--workspace", type=click.Path(path_type=Path), required=True, help="Workspace to write.")
def main(model: Path, workspace: Path) -> None:
    """Profile MODEL on Wikipedia introductions, train predictors, place neurons, generate text; about three minutes."""
    profile = run_command("pi-profile", model, "--corpus", CORPUS, "--tokens", PROFILE_TOKENS, "-o", workspace)
    training = ["--corpus", CORPUS, "--tokens", TRAINING_TOKENS, "--window", WINDOW]
    predictors = run_command("pi-train-predictor", workspace, *training)
    click.echo(f"\n{PLACEMENT_NOTE}")
    placement = run_command("pi-place", workspace, *PLACEMENT)
    quality = run_command("pi-eval", workspace, "--corpus", CORPUS, "--window", WINDOW)
    text = run_command("pi-run", workspace, "-p", PROMPT, "-n", NEW_TOKENS)
    click.echo("")
    print_summary(profile, predictors, placement, quality)
    click.echo(f"\n{PROMPT}{text['text']}")


def run_command(name: str, *arguments: object) -> dict[str, Any]:
    """Run one command as a user would, showing what it prints; its JSON result. Ends this program where it fails."""
    words = [name, *map(str, arguments)]
    click.secho(f"\n$ {shlex.join(words)}", bold=True)
    command = [str(Path(sys.executable).with_name(name)), *words[1:], "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if len(lines) > 1:
                click.echo(lines[-2], nl=False)
    if process.returncode:
        raise click.exceptions.Exit(process.returncode)
    return json.loads(lines[-1])


def print_summary(
    profile: dict[str, Any], predictors: dict[str, Any], placement: dict[str, Any], quality: dict[str, Any]
) -> None:
    """Locality, predictor quality and placement per layer, then the figures of the whole model."""
    layers = predictors["layers"]
    print_table(
        {
            "layer": range(profile["layers"]),
            "fire per token": [percent(share) for share in profile["firing_share"]],
            "carry 80 % of firings": [percent(share) for share in profile["share_for_80_percent"]],
            "predictor recall": [f"{layer['recall']:.4f}" for layer in layers],
            "candidates": [percent(layer["density"]) for layer in layers],
            "hot neurons": placement["gpu_neurons"],
        }
    )
    change = f"{quality['delta_percent']:+.2f} %"
    click.echo(
        f"\n{percent(profile['share_for_80_percent_model'])} of all neurons carry 80 % of the firings; the hot tier holds "
        f"{percent(placement['gpu_share_of_firings'])} of the firings\nperplexity on held-out articles: dense "
        f"{quality['perplexity_dense']:.2f}, predicted {quality['perplexity_predicted']:.2f} ({change})"
    )


if __name__ == "__main__":
    main()
