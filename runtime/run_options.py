"""Options of the commands that run a model."""

import click

from pi_toolkit.profiler.command_line import MOST_THREADS

from .kernels.packed_matrix import KINDS

threads_option = click.option(
    "--threads", type=click.IntRange(1, MOST_THREADS), help="CPU threads.  [default: torch's choice]"
)
kind_option = click.option(
    "--dtype",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    show_default=True,
    help="Type to hold the weights in; auto: as stored, or as placed on a GPU.",
)
