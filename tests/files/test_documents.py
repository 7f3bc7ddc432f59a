"""JSON, YAML and XML of others: a value in proportion to the file, or a sentence."""

import contextlib
import os
import pathlib
import re
import string

import hypothesis
import pytest
from hypothesis import strategies

from keras_vit import UserError
from keras_vit.errors import shown
from keras_vit.files import documents
from keras_vit.files.documents import read_json, read_text, read_xml, read_yaml

READERS = {"json": read_json, "yaml": read_yaml, "xml": read_xml}


@pytest.fixture(name="file")
def _file(tmp_path) -> pathlib.Path:
    return tmp_path / "file"


def test_scalars_of_yaml_stay_the_words_that_were_typed(file):
    file.write_text("names: [on, off, 01, null, ~, 1.50, 2024-01-01, 'a b', \"\\u00e9\"]\n0x1: yes\nval:\n")
    words = ["on", "off", "01", "null", "~", "1.50", "2024-01-01", "a b", "é"]
    assert read_yaml(file) == {"names": words, "0x1": "yes", "val": ""}
    file.write_text("# nothing\n")
    assert read_yaml(file) == ""


BOMB = "l0: &l0 [lol]\n" + "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
ENTITIES = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><x>&b;</x>'
REFUSED = [
    ("yaml", BOMB, "the alias *l0 refers"),
    ("yaml", "m: &m {a: 1}\nn: {<<: *m}\n", "the alias *m refers"),
    ("yaml", "names: !!timestamp foo\n", "the tag"),
    ("yaml", "names: !!int ''\n", "the tag"),
    ("yaml", "!!python/object/apply:os.system ['touch x']\n", "the tag"),
    ("yaml", "a: 1\na: 2\n", "the key 'a' is there twice"),
    ("yaml", "{[a]: 1}\n", "is not a text"),
    ("yaml", "a: 1\n---\nb: 2\n", "several documents"),
    ("yaml", "[" * 100_000, "more than 32 levels"),
    ("yaml", "a" * 2**20, "more than 524,288 bytes"),
    ("json", "[" * 100_000, "cannot be read as JSON"),
    ("json", "9" * 5000, "cannot be read as JSON"),
    ("json", " " * 2**21, "more than 1,048,576 bytes"),
    ("xml", ENTITIES, "cannot be read as plain XML"),
    ("xml", '<!DOCTYPE x SYSTEM "file:///etc/passwd"><x/>', "cannot be read as plain XML"),
    ("xml", "<a>" * 100 + "</a>" * 100, "more than 32 levels"),
    ("xml", "<a", "cannot be read as plain XML"),
]


@pytest.mark.parametrize(("kind", "text", "words"), REFUSED)
def test_what_takes_more_than_it_has_is_refused(kind, text, words, file):
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        READERS[kind](file)
    message = str(refused.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(file))


def test_only_regular_files_are_read(file):
    os.mkfifo(file)
    for path in (file, pathlib.Path("/dev/zero"), file.parent, file.parent / ("x" * 5000)):
        with pytest.raises(UserError, match="cannot be read as text"):
            read_text(path)


def test_values_are_cut_before_they_are_shown():
    deep: list = []
    for _ in range(900):
        deep = [deep]
    for value in (deep, "\x1b[2J" + "a" * 10**7, list(range(10**6)), {str(n): deep for n in range(99)}, 10**4000):
        assert len(shown(value)) <= 60
        assert "\x1b" not in shown(value)


SPECIAL = "&*!|>%@`[]{},:#?-<>/\"'=\\\n\t 0a\x00\x1bé"
TEXTS = strategies.text(strategies.sampled_from(SPECIAL + string.ascii_letters), max_size=60)


@pytest.mark.parametrize("examples", [100, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", READERS)
def test_any_file_is_a_value_or_a_sentence(kind, examples, file):
    parts = {"xml": ["<a>", "</a>", "<a b='c'>", "<!--", "-->", "<![CDATA[", "]]>", "&amp;", "&#1;", "<?x ?>"]}
    words = strategies.lists(strategies.sampled_from(parts.get(kind, ["[", "]", ": ", "- ", "\n", '"'])) | TEXTS)

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(strategies.binary(max_size=60) | TEXTS.map(str.encode) | words.map("".join).map(str.encode))
    def check(content: bytes) -> None:
        file.write_bytes(content)
        with contextlib.suppress(UserError):
            assert "\n" not in shown(READERS[kind](file))

    check()


def test_yaml_and_xml_are_read_in_one_module():
    root = pathlib.Path(documents.__file__).parents[2]
    files = [file for package in ("keras_vit", "training", "export") for file in (root / package).rglob("*.py")]
    words = re.compile(r"^\s*(import|from) (yaml|xml|defusedxml)\b", re.MULTILINE)
    assert [file.name for file in files if words.search(file.read_text())] == ["documents.py"]
