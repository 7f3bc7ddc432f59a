"""Names in tables: no formulas in a spreadsheet, no HTML in Markdown, no control characters on a terminal."""

import csv
import io

import pytest

from keras_vit.errors import printable
from keras_vit.files.tables import CsvWriter, cell_of_csv, markdown_table


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
    table = markdown_table(["a"], [["<script>x</script>"], ["[x](javascript:y)|`z`"], ["\x1b[31m\\ \x07"]])
    assert r"\<script>" in table
    assert r"\[x](javascript:y)\|\`z\`" in table
    assert r"\x1b\[31m\\ \x07" in table
    assert "\x1b" not in table


def test_control_characters_are_shown():
    assert printable("a\x1b]0;x\x07\u202eb\x9b\x7f\n\té") == r"a\x1b]0;x\x07\u202eb\x9b\x7f" + "\n\té"
