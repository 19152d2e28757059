"""Draws the figures in `plots/`: each says which frame it needs and has `draw(frame, styles) -> Figure`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt import files, markup
from dpopt._paths import at_hand
from dpopt.errors import ConfigError, unknown
from dpopt.results.drawing import Styles, on_page

OF_SUITES = (
    *("comparison", "curves", "ranking", "sweep", "settings", "rates", "diagnostics", "classes", "class_scores"),
    "transfers",
)
"""Frames of `results.Results`, which a figure of a suite may need."""
KINDS = ("svg", "png")
_DEFAULT = Path("plots")
OF_COMMANDS = {"speed": "dpopt bench", "audit": "dpopt audit"}
"""Frames of no suite -> the command that draws their figures."""


@dataclass(frozen=True)
class Plot:
    """One figure: `draw` makes a matplotlib Figure of a frame and its suite's styles, or None of nothing to show."""

    name: str  # file name without `.py`
    needs: str  # of `OF_SUITES` or `OF_COMMANDS`
    draw: Callable[[pd.DataFrame, Styles], Any]

    def figure(self, frame: pd.DataFrame, styles: Styles | None = None, width: float | None = None) -> Any:
        """The figure that `draw` makes of `frame`, whose texts are no mathematics, in `drawing.styles_of` the suite.

        With a `width` in inches it has this, see `drawing.on_page`; `ConfigError` for one that is no page's.
        """
        shown = frame.copy(deep=False)
        for name in frame.select_dtypes(exclude="number"):
            shown[name] = frame[name].map(lambda value: markup.figure(value) if isinstance(value, str) else value)
        with on_page(width):
            figure = self.draw(shown, {markup.figure(label): style for label, style in (styles or {}).items()})
        if figure is not None and width and (share := width / figure.get_figwidth()) != 1:
            # Its panels are no helper's: all of it keeps its proportions.
            figure.set_size_inches(width, figure.get_figheight() * share)
            for text in figure.findobj(lambda artist: hasattr(artist, "set_fontsize")):
                text.set_fontsize(text.get_fontsize() * min(1.0, share))
        return figure


def plots(folder: Path, name: str | None = None) -> list[Plot]:
    """The figures that `folder` holds, in the order of their names, or the one of that name.

    The default folder adds to the figures that come with dpopt, any other one stands alone.

    Raises:
        ConfigError: no such folder, no such figure, or a file without `NEEDS` and `draw`.
    """
    if folder != _DEFAULT and not folder.is_dir():
        raise ConfigError("plots", str(folder), "expected a folder of figure files")
    files = at_hand("plots", "[!_]*.py") if folder == _DEFAULT else {f.stem: f for f in sorted(folder.glob("[!_]*.py"))}
    if name is not None and name not in files:
        raise unknown("figure", name, files)
    return [_load(file) for stem, file in files.items() if name in (None, stem)]


def _load(file: Path) -> Plot:
    loader = SourceFileLoader(f"dpopt_plot_{file.stem}", str(file))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ConfigError("plots", str(file), f"it cannot be imported: {type(error).__name__}: {error}") from error
    frames = (*OF_SUITES, *OF_COMMANDS)
    needs, draw = getattr(module, "NEEDS", None), getattr(module, "draw", None)
    if needs not in frames or not callable(draw):
        raise ConfigError("plots", str(file), f"expected NEEDS, one of {', '.join(frames)}, and draw(frame, styles)")
    return Plot(file.stem, needs, draw)


def render(figure: Any, kinds: Sequence[str] = KINDS, is_cropped: bool = True) -> dict[str, bytes]:
    """A figure as the contents of files, by their kind, the same bytes each time; it is closed.

    With `is_cropped` its margins go; without, it is as wide as it was made.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    contents = {}
    # A date or a version would change the bytes of a figure that shows the same.
    dated = {"svg": ("Creator", "Date"), "pdf": ("Creator", "Producer", "CreationDate")}
    for kind in kinds:
        buffer = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": "dpopt", "pdf.fonttype": 42}):  # letters that journals accept
            box, dpi = ("tight", 150) if is_cropped else (None, 300)
            metadata = dict.fromkeys(dated.get(kind, ()))
            figure.savefig(buffer, format=kind, bbox_inches=box, dpi=dpi, metadata=metadata)
        contents[kind] = buffer.getvalue()
    plt.close(figure)
    return contents


def save(figure: Any, folder: Path, name: str, kinds: Sequence[str] = KINDS, is_cropped: bool = True) -> list[Path]:
    """Write a figure into `folder`, a file for each kind; see `render`."""
    contents = {folder / f"{name}.{kind}": content for kind, content in render(figure, kinds, is_cropped).items()}
    for path, content in contents.items():
        files.write(path, content)
    return list(contents)
