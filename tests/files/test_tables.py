"""Tables of the reports: escaped cells, also for spreadsheets, rounded numbers, and names without folders."""

import csv
import io

import pytest

from keras_vit.files.tables import CsvWriter, cell_of_csv, markdown_table, rounded_to, short_name


def test_cells_are_one_line_with_escaped_bars_and_as_wide_as_a_terminal_shows_them():
    table = markdown_table(("class", "images"), [("a|b\nc", "12"), ("日本e\u0301", "3")], num_text_columns=1)
    lines = ["| class  | images |", "|--------|-------:|", "| a\\|b c |     12 |", "| 日本e\u0301  |      3 |"]
    assert table.splitlines() == lines


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (0.98333, (0.96944, 0.99444), ("0.983", "0.969 to 0.994")),
        (1.0, (1.0, 1.0), ("1.000", "1.000 to 1.000")),
        (52.31, (31.0, 74.9), ("52", "31 to 75")),
        (0.99444, (0.98611, 1.0), ("0.994", "0.986 to 1.000")),
    ],
)
def test_numbers_are_rounded_to_what_their_interval_allows(value, interval, expected):
    assert rounded_to(value, interval) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/anna/runs/birds", "birds"), ("runs/birds/model.keras", "birds"), ("C:\\runs\\birds", "birds"),
        ("folder:/home/anna/pictures", "folder:pictures"), ("digits", "digits"), ("gs://bucket/runs/birds", "birds"),
    ],
)  # fmt: skip
def test_a_title_has_no_folders(path, expected):
    assert short_name(path) == expected


@pytest.mark.parametrize("text", ["=1+1", "+a", "-a", "@a", "\ta", "\ra", "＝1", "'=1", "''@a", "-1-1", "- "])
def test_a_cell_is_no_formula_and_can_be_read_back(text):
    stream, raw = io.StringIO(newline=""), io.StringIO(newline="")
    CsvWriter(stream).writerow([text, 1])
    CsvWriter(raw, raw=True).writerow([text, 1])
    [[cell, number]] = csv.reader(io.StringIO(stream.getvalue(), newline=""))
    assert (cell, number) == ("'" + text, "1")
    assert cell_of_csv(cell) == text
    assert next(csv.reader(io.StringIO(raw.getvalue(), newline="")))[0] == text


@pytest.mark.parametrize("text", ["-1", "+0.5", "-1.5e-07", "cat", "a=b", "'a", "", "5"])
def test_numbers_and_words_stay(text):
    stream = io.StringIO(newline="")
    CsvWriter(stream).writerow([text, -2.5])
    assert next(csv.reader(io.StringIO(stream.getvalue()))) == [text, "-2.5"]
    assert cell_of_csv(text) == text


def test_a_table_in_markdown_has_no_html_links_or_control_characters():
    table = markdown_table(
        ["a"], [["<script>x</script>"], ["[x](javascript:y)|`z`"], ["\x1b[31m\\ \x07"], ["ant < 0.1%"]]
    )
    assert r"\<script>" in table
    assert r"\[x](javascript:y)\|\`z\`" in table
    assert r"\x1b\[31m\\ \x07" in table
    assert "\x1b" not in table
    assert "ant < 0.1%" in table
