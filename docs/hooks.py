"""What mkdocs.yml cannot say: the version in the footer, and options that no line break divides."""

import pathlib
import re

_CODE = re.compile(r"<code[^>]*>.*?</code>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<]+")
_OPTION = re.compile(r"--[a-z][\w.-]*|\bkeras-vit\b")


def on_config(config):
    """Show the version of the package on every page."""
    source = pathlib.Path(config.config_file_path).with_name("keras_vit") / "__init__.py"
    version = re.search(r'__version__ = "(.*)"', source.read_text())[1]
    config.copyright = f"keras_vit {version}, Apache License 2.0"
    return config


def on_page_content(html, **_):
    """Keep each option of a code span or block on one line."""
    return _CODE.sub(lambda code: _TEXT.sub(_whole_options, code[0]), html)


def _whole_options(text):
    return _OPTION.sub(r'<span class="whole">\g<0></span>', text[0])
