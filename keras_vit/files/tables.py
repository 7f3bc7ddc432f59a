"""Tables for the terminal and Markdown."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 0) -> str:
    """A Markdown table with aligned columns, right-justified except for the first `num_text_columns`."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        justified = (
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(justified)} |"

    rules = (
        "-" * (width + 2) if column < num_text_columns else "-" * (width + 1) + ":"
        for column, width in enumerate(widths)
    )
    return "\n".join([line(header), f"|{'|'.join(rules)}|", *map(line, rows)])
