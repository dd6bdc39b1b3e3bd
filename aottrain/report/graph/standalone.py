"""A picture that stands by itself: an SVG file, which follows the scheme of what shows it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from aottrain.explain.autograd import autograd_diagram
from aottrain.explain.records import Diagram
from aottrain.ir.settings.files import write_text_whole
from aottrain.report.graph.figure import RULES
from aottrain.report.graph.picture import draw
from aottrain.report.style import variables

_FONT = 'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif"'


class Drawing:
    """A diagram as a picture, which a notebook shows where it is a cell's last value."""

    def __init__(self, diagram: Diagram):
        self.diagram = diagram

    @property
    def svg(self) -> str:
        """The text of a whole SVG file."""
        dark = f"@media (prefers-color-scheme: dark) {{ svg.graph {{ {variables(1)} }} }}"
        style = f"svg.graph {{ {variables(0)} background: var(--page); }}\n{dark}\n{RULES}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {_FONT} '
        whole = draw(self.diagram, "picture").replace("<svg ", head, 1)
        return whole.replace("<defs>", f"<style>{style}</style><defs>", 1)

    def save(self, path: str | Path) -> Path:
        """Write it as an SVG file; gives its path."""
        path = Path(path)
        write_text_whole(path, self.svg + "\n")
        return path

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Drawing of {self.diagram.title}: {len(self.diagram.steps)} steps; .save(path.svg), .svg>"


def draw_autograd(result: Tensor, model: nn.Module | None = None) -> Drawing:
    """The graph behind a tensor of an eager program, before its backward has run: functions, and as thick lines the
    tensors that they keep for the backward, with their sizes, each storage once. model: names the parameters.

    ValueError where the tensor has no graph.
    """
    names = {} if model is None else {id(value): name for name, value in model.named_parameters()}
    return Drawing(autograd_diagram(result, names))
