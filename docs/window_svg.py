"""Draws window.svg, the picture of how-it-works.md: `python docs/window_svg.py > docs/window.svg`.

The numbers of bytes are checked against the ops' own formulas by tests/test_docs.py.
"""

from __future__ import annotations

from html import escape

# Bytes per element with float32 parameters; in brackets with bfloat16 gradients.
SECOND, LATER, SECOND_16, LATER_16 = 12, 12, 8, 10
ADAMW, SGD_MOMENTUM = 28, 20
CHUNK, FINISH_PER_CHUNK = 8192, 16

ROWS = (
    ("micro-batch 1", ".grad", "kept as it came", "0", "nothing is copied"),
    (
        "micro-batch 2", ".grad", "kept + .grad, into the flat buffer", f"{SECOND} [{SECOND_16}]",
        "2 read, 1 written",
    ),
    ("micro-batch 3", ".grad", "flat buffer + .grad, in place", f"{LATER} [{LATER_16}]", "2 read, 1 written"),
    (
        "micro-batch 4", ".grad", "flat buffer + .grad; the squares are summed", f"{LATER} [{LATER_16}]",
        "the norm costs nothing",
    ),
)  # fmt: skip
ENDS = (
    ("finish", "sums of chunks", "norm, clip factor, skip, step counts",
     f"{FINISH_PER_CHUNK} per chunk of {CHUNK}", "close to 0"),
    ("update", "parameter, state", "average, unscale, clip and update in one pass",
     f"{ADAMW}", f"AdamW; SGD with momentum {SGD_MOMENTUM}"),
    ("next window", "", "the buffer is overwritten, not zeroed", "0", ""),
)  # fmt: skip

WIDTH, ROW, TOP = 900, 58, 54
COLUMNS = (20, 150, 320, 670)  # who, what is read, what happens, bytes


def text(x: int, y: int, words: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def row(y: int, cells: tuple[str, ...], kind: str) -> list[str]:
    """One stage: two boxes with an arrow between them, and what it costs."""
    who, source, target, cost, note = cells
    parts = [text(COLUMNS[0], y + 26, who, "who")]
    if source:
        parts.append(f'<rect x="{COLUMNS[1]}" y="{y}" width="140" height="40" rx="5" class="source"/>')
        parts.append(text(COLUMNS[1] + 70, y + 25, source, "in"))
        parts.append(
            f'<line x1="{COLUMNS[1] + 140}" y1="{y + 20}" x2="{COLUMNS[2] - 3}" y2="{y + 20}" '
            'class="arrow" marker-end="url(#head)"/>'
        )
    parts.append(f'<rect x="{COLUMNS[2]}" y="{y}" width="320" height="40" rx="5" class="{kind}"/>')
    parts.append(text(COLUMNS[2] + 160, y + 25, target, "in"))
    parts.append(text(COLUMNS[3], y + 18, cost, "cost"))
    parts.append(text(COLUMNS[3], y + 36, note, "note"))
    return parts


def draw() -> str:
    """The whole picture."""
    stages = [*((cells, "held") for cells in ROWS), *((cells, "end") for cells in ENDS)]
    height = TOP + ROW * len(stages) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The data flow of one window of four micro-batches">',
        "<style>text{font:14px sans-serif;fill:#222}.who,.cost{font-weight:bold}"
        ".note{fill:#666;font-size:12px}.in{text-anchor:middle;font-size:13px}rect{stroke:#555}.source{fill:#fff}.held{fill:#dbe9f6}"
        ".end{fill:#e3f1df}.arrow{stroke:#555;stroke-width:1.5}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#555"/></marker></defs>',
        f'<rect x="0" y="0" width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>',
        text(COLUMNS[1], 30, "reads", "note"),
        text(COLUMNS[2], 30, "does", "note"),
        text(COLUMNS[3], 30, "bytes per element", "note"),
    ]
    for i, (cells, kind) in enumerate(stages):
        y = TOP + ROW * i
        parts += row(y, cells, kind)
        if i + 1 < len(stages):
            x = COLUMNS[2] + 160
            parts.append(
                f'<line x1="{x}" y1="{y + 40}" x2="{x}" y2="{y + ROW - 3}" class="arrow" '
                'marker-end="url(#head)"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(draw(), end="")
