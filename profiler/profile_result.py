"""What ``pi-profile`` makes of its counts: the numbers, the files of ``activation/`` and what is printed."""

from dataclasses import dataclass
from typing import Any

import click

from . import activation_stats
from .activation_stats import ActivationStats
from .command_line import note, percent, print_table
from .convergence import Agreement, Convergence, measure_agreement, measure_convergence
from .locality import Locality, locality_figure, measure_locality, odd_layers
from .profile_report import profile_report
from .record import Recording
from .workspace import ModelRecord, Workspace, write_model


@dataclass(frozen=True)
class ProfileResult:
    """One profile; ``comparison`` is with the counts on the corpus ``compared_with``."""

    stats: ActivationStats
    locality: Locality
    convergence: Convergence | None
    comparison: Agreement | None = None
    compared_with: str = ""

    @classmethod
    def of(cls, recording: Recording, stats: ActivationStats, other: ActivationStats | None) -> "ProfileResult":
        """*stats* are those of *recording*; *other* is to be compared with them."""
        locality = measure_locality(stats.counts, recording.tokens)
        convergence = measure_convergence(recording.half_counts, recording.half_tokens)
        if other is None:
            return cls(stats, locality, convergence)
        comparison = measure_agreement(stats.counts, other.counts, (recording.tokens, other.tokens))
        return cls(stats, locality, convergence, comparison, other.corpus or "another corpus")

    def write(self, workspace: Workspace, record: ModelRecord) -> None:
        """Counts, figure and report in one step, then ``model.json``."""
        tokens = self.stats.tokens or 0
        title = f"{record.name}: {tokens:,} tokens of {self.stats.corpus}"
        comparison = {"corpus": self.compared_with, **self.comparison.to_json()} if self.comparison else None
        activation_stats.write(
            workspace.activation,
            self.stats,
            {
                "locality.png": locality_figure(self.stats.counts, tokens, title),
                "report.html": profile_report(
                    record.name, self.stats, self.convergence, self.comparison, self.compared_with
                ),
            },
            self.convergence.to_json() if self.convergence else None,
            comparison,
            record.shape.activation_threshold,
        )
        write_model(workspace, record)

    def show(self) -> None:
        """One row per layer, then the whole model, on stdout."""
        print_table(
            {
                "layer": range(len(self.stats.counts)),
                "neurons": [len(counts) for counts in self.stats.counts],
                "fire per token": [percent(share) for share in self.locality.firing_share],
                "carry 80 % of firings": [percent(share) for share in self.locality.share_for_80_percent],
            }
        )
        share = percent(self.locality.share_for_80_percent_model)
        click.echo(f"\n{share} of the model's FFN neurons carry 80 % of its firings")
        if odd := odd_layers(self.locality):
            note(odd)
        if self.convergence:
            _show_agreement("half of the documents and all of them", self.convergence.half_and_all)
            _show_agreement("the two halves of the documents", self.convergence.halves)
        if self.comparison:
            _show_agreement(f"this corpus and {self.compared_with}", self.comparison)

    def to_json(self) -> dict[str, Any]:
        """The part of ``--json`` that is about the counts."""
        return {
            "tokens": self.stats.tokens,
            "layers": len(self.stats.counts),
            **vars(self.locality),
            "convergence": self.convergence and self.convergence.to_json(),
            "comparison": self.comparison and self.comparison.to_json(),
        }


def _show_agreement(what: str, agreement: Agreement) -> None:
    correlation = agreement.rank_correlation_model
    ranks = "" if correlation is None else f", rank correlation {correlation:.4f}"
    click.echo(f"{what} agree on {percent(agreement.hot_overlap_model)} of the hottest fifth{ranks}")
