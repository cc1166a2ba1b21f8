"""The directive `playground` of concepts/law.md: a figure that a script makes interactive, and a picture without it.

Its content is JSON: the objective and its settings, and the angles of the anchor, the positives and the negatives.
"""

from __future__ import annotations

import html
import json
import math
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RADIUS = 150
NO_SCRIPT = """The figure needs JavaScript to be interactive. Here it shows NT-Xent: solid lines pull the anchor q to
its positives, and dashed lines push it away from the negatives, the wider the harder."""


class PlaygroundDirective(SphinxDirective):
    """Write the element that `_static/playground.js` fills, with a static picture of the same points inside it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        start = json.loads("\n".join(self.content))
        given = html.escape(json.dumps(start), quote=True)
        picture = f"<figure>{static_picture(start)}<figcaption>{NO_SCRIPT}</figcaption></figure>"
        depth = "../" * self.env.docname.count("/")
        script = f'<script src="{depth}_static/playground.js" defer></script>'
        text = f'<div id="playground" class="playground" data-start="{given}">{picture}</div>\n{script}'
        return [nodes.raw("", text, format="html")]


def static_picture(start: dict[str, Any]) -> str:
    """Draw the points and the forces of NT-Xent as an SVG element.

    Args:
        start: the content of the directive.
    """
    x, y = place(start["anchor"])
    temperature, positives, negatives = start["settings"]["temperature"], start["positives"], start["negatives"]
    powers = [math.exp(math.cos(angle - start["anchor"]) / temperature) for angle in [*positives, *negatives]]
    parts = [f'<circle class="rim" r="{RADIUS}"/>']
    for n, angle in enumerate([*positives, *negatives]):
        pull = (n < len(positives)) / len(positives) - powers[n] / sum(powers)
        end, width = place(angle), 0.5 + 9 * abs(pull)
        line = f'x1="{x:.1f}" y1="{y:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke-width="{width:.1f}"'
        parts.append(f'<line class="{"pull" if pull > 0 else "push"}" {line}/>')
    marked = [("positives", f"+{n}", angle) for n, angle in enumerate(positives, 1)]
    marked += [("negatives", f"−{n}", angle) for n, angle in enumerate(negatives, 1)]
    marked.append(("anchor", "q", start["anchor"]))
    for kind, mark, angle in marked:
        at = ",".join(f"{value:.1f}" for value in place(angle))
        parts.append(f'<g class="point {kind}" transform="translate({at})"><circle r="13"/><text>{mark}</text></g>')
    label = "An anchor, its positives and its negatives on a circle"
    return f'<svg viewBox="-196 -196 392 392" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def place(angle: float) -> tuple[float, float]:
    """Return the coordinates of an angle on the circle; the y axis of a picture points down."""
    return RADIUS * math.cos(angle), -RADIUS * math.sin(angle)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("playground", PlaygroundDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
