"""The page of a leaderboard: its tables and a figure."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from dpopt.results import figures
from dpopt.results.drawing import styles_of
from dpopt.results.leaderboard import Leaderboard
from dpopt.results.report import svg
from dpopt.results.report.sheet import Drawing, sheet
from dpopt.results.writing import Table

_CAPTION = "Average ranks and their critical difference."


def leaderboard(board: Leaderboard, plots: Path, baseline: str = "", by: str = "epsilon") -> dict[str, str | bytes]:
    """A page as Markdown and HTML, the figure, and the numbers as CSV (p too), by the names of their files.

    Args:
        plots: folder of the figures' files.
        baseline, by: see `Leaderboard.tables`.
    """
    tables, pictures, files = board.tables(baseline, by), list[Drawing](), dict[str, str | bytes]()
    parts = [f"## {table.title}\n\n{table.markdown}" for table in tables]
    (plot,), blocks = figures.plots(plots, "average_ranks"), board.blocks
    figure = None if blocks.empty else plot.figure(blocks, styles_of(blocks["label"]))
    if figure is not None:
        parts.insert(1, f"![{_CAPTION}](leaderboard.svg)")
        pictures.append(Drawing("average_ranks", _CAPTION, "", Markup(svg.render(figure, "figure-1", _CAPTION)), ""))
        figure = plot.figure(blocks, styles_of(blocks["label"]))  # anew, as drawing moves its parts
        files["leaderboard.svg"] = figures.render(figure, ["svg"])["svg"]
    if baseline:
        files["leaderboard_against.csv"] = tables[1].csv
    return files | {
        "leaderboard.md": "\n\n".join(["# Leaderboard", board.about, *parts]) + "\n",
        "leaderboard.html": sheet("Leaderboard", tables, pictures, board.about),
        "leaderboard.csv": tables[0].csv,
        "leaderboard_scores.csv": Table(board.scores).csv,
    }
