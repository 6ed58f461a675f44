"""HTML pages that step through a schedule: one text, without a library or another file."""

from __future__ import annotations

import html
import json

from unisono.core.schedules.verify import contributions
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.pictures.diagrams import COLOURS, columns, diagram
from unisono.workbench.simulate.pictures.timeline import Timeline

# The data of more ranks and chunks does not fit on a screen.
_MOST_RANKS, _MOST_CHUNKS = 64, 64


def page(timeline: Timeline, template: str) -> str:
    """Return the page of a schedule.

    Args:
        timeline: The schedule, in rounds or in virtual time.
        template: The text of `shipped/page.html`.

    Raises:
        InvalidArgumentError: There are more than 64 ranks or chunks.
    """
    schedule = timeline.schedule
    name = f"{schedule.collective}, {schedule.algorithm}, {schedule.world_size} ranks"
    if schedule.world_size > _MOST_RANKS or schedule.output_chunks > _MOST_CHUNKS:
        raise InvalidArgumentError(
            f"{name}: a page has at most {_MOST_RANKS} ranks and {_MOST_CHUNKS} chunks, "
            f"got {schedule.output_chunks} chunks"
        )
    data = {
        "ranks": schedule.world_size,
        "stages": schedule.stages,
        "colours": COLOURS,
        # A run has no columns, because its rounds overlap.
        "columns": columns(schedule) if timeline.result is None else None,
        "messages": [
            [m.source, m.target, m.stage, m.chunk, int(m.reduces), int(m.critical)]
            for m in timeline.messages
        ],
        "states": contributions(schedule),
    }
    # "</" would end the script.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    colour = "Its colour is that of its first chunk."
    if timeline.result is not None:
        colour = "Red is the critical path."
    parts = {
        "TITLE": html.escape(name), "DATA": text, "DIAGRAM": diagram(timeline).svg(),
        "COLOUR": colour,
    }  # fmt: skip
    for key, part in parts.items():
        template = template.replace(f"@{key}@", part)
    return template
