"""The pictures of docs/how-state-moves.md: which bytes of a sharded tensor move at a change.

    python -m benchmarks.state_pictures docs/images

Writes ``state-4-to-6.svg``: the same change with every rank keeping its number, and in the order of
new ranks that moves the fewest bytes. :mod:`benchmarks.sharded_account` computes the shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmarks.sharded_account import Tensor, best_order, in_order, least, overlaps, rows_of

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
LEFT, WIDTH, BAR, GAP = 110, 600, 26, 12
STATE = [Tensor(24_000, 4)]
"""Rows of a large tensor, for which rounding is negligible."""


def _bar(x: float, y: float, width: float, fill: str, opacity: float, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="#333" stroke-width="0.8"><title>{title}</title></rect>'
    )


def _text(x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def _panel(y: float, title: str, old: int, new: int, places: Mapping[int, int]) -> list[str]:
    """Draw one order: the new ranks' shards, each piece in the colour of the node that had it; full
    colour if it is already there, pale if it must move.
    """
    rows, overlap = STATE[0].rows, overlaps(STATE, old, new) // STATE[0].row_bytes
    node_at = {rank: node for node, rank in places.items()}
    newcomers = iter(range(old, old + new))
    out = [_text(0, y, title, 14)]
    y += 14
    for rank in range(new):
        node = node_at.get(rank)
        name = f"node {chr(65 + (next(newcomers) if node is None else node))}"
        out.append(_text(LEFT - 8, y + BAR * 0.68, f"{name}, rank {rank}", 12, "end"))
        first, _ = rows_of(rows, rank, new)
        for source in range(old):
            count = int(overlap[source, rank])
            if not count:
                continue
            begin = max(first, rows_of(rows, source, old)[0])
            x = LEFT + WIDTH * begin / rows
            words = f"{count / rows:.1%} from node {chr(65 + source)}"
            stays = source == node
            out.append(
                _bar(
                    x,
                    y,
                    WIDTH * count / rows,
                    COLOURS[source],
                    1.0 if stays else 0.3,
                    "stays" if stays else words,
                )
            )
        y += BAR + 4
    return out


def picture(old: int, new: int) -> str:
    """Return the change from ``old`` ranks to more, as SVG."""
    whole = STATE[0].rows * STATE[0].row_bytes
    same = {rank: rank for rank in range(old)}
    best = best_order(STATE, old, new, range(old))
    out = [_text(0, 16, f"Before: {old} ranks", 14)]
    for rank in range(old):
        first, end = rows_of(STATE[0].rows, rank, old)
        x, width = LEFT + WIDTH * first / STATE[0].rows, WIDTH * (end - first) / STATE[0].rows
        name = f"node {chr(65 + rank)}"
        out.append(_bar(x, 26, width, COLOURS[rank], 1.0, name))
        out.append(_text(x + width / 2, 26 + BAR * 0.68, name, 12, "middle"))
    y = 26 + BAR + 3 * GAP
    panels = (
        ("every rank keeps its number", in_order(STATE, old, new), same),
        ("the order that moves the fewest", least(STATE, old, new, range(old)), best),
    )
    for words, moved, places in panels:
        title = f"After: {new} ranks, {words}: {moved / whole:.0%} of the state moves"
        out += _panel(y, title, old, new, places)
        y += 14 + new * (BAR + 4) + 2 * GAP
    out.append(
        _text(0, y, "Full colour: already there. Pale: comes from the node of that colour.", 12)
    )
    height = y + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 0 {LEFT + WIDTH + 12} {height:.0f}" '
        f'font-family="sans-serif">\n<rect x="-4" width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(out)
        + "\n</svg>\n"
    )


PICTURES = {"state-4-to-6.svg": (4, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, (old, new) in PICTURES.items():
        (folder / name).write_text(picture(old, new))


if __name__ == "__main__":
    main()
