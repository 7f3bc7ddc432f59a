"""The templates: values are escaped, missing ones are errors, and no page needs a network."""

import jinja2
import pytest

from keras_vit.cli import pages

TEMPLATES = sorted(path.name for path in (pages._TEMPLATES).iterdir())


def test_values_are_escaped():
    values = {"title": "<b>", "words": "<script>alert()</script>", "cards": [{"name": '"&', "figures": []}]}
    page = pages.render("segments", **values)
    assert "<title>&lt;b&gt;</title>" in page
    assert "<script>" not in page
    assert "<h2>&#34;&amp;</h2>" in page


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="cards"):
        pages.render("boxes", title="t", words=[])


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_names_an_address(name):
    text = (pages._TEMPLATES / name).read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert "| safe" not in text
