"""What mkdocs.yml cannot say: the version in the footer, a page of options for each command, and unbroken options."""

import contextlib
import importlib
import inspect
import io
import json
import os
import pathlib
import re
from unittest import mock

from mkdocs.structure.files import File

from keras_vit.cli.commands import COMMANDS
from keras_vit.cli.parser import OPTIONS_ALONE
from keras_vit.published import find_models

_CODE = re.compile(r"<code[^>]*>.*?</code>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<]+")
_OPTION = re.compile(r"--[a-z][\w.-]*|\bkeras-vit\b")


# The parts of a command that have options of their own.
_PARTS = {
    "anomaly": ("fit", "predict"),
    "detect": ("predict", "fit", "evaluate"),
    "segment": ("fit", "evaluate", "predict"),
}


def on_config(config):
    """Show the version of the package on every page, and list the generated pages."""
    source = pathlib.Path(config.config_file_path).with_name("keras_vit") / "__init__.py"
    version = re.search(r'__version__ = "(.*)"', source.read_text())[1]
    config.copyright = f"keras_vit {version}, Apache License 2.0"
    parts = {name: pages for part in config.nav for name, pages in part.items()}
    parts["Models"].insert(0, {"Models with checkpoints": "reference/zoo.md"})
    parts["Reference"].append(
        {"Options of each command": [{name: f"reference/commands/{name}.md"} for name in sorted(COMMANDS)]}
    )
    return config


def on_files(files, config):
    """Add a page of options for each command, and one of the models with checkpoints."""
    files.append(File.generated(config, "reference/zoo.md", content="\n".join(_zoo())))
    for name, module in COMMANDS.items():
        text = f"# keras-vit {name}\n\n{inspect.cleandoc(importlib.import_module(module).__doc__ or '')}\n"
        for part in _PARTS.get(name, ()):
            text += f"\n## keras-vit {name} {part}\n{_options(module, [part]).replace('## ', '### ')}"
        if name not in _PARTS:
            text += _options(module, [])
        files.append(File.generated(config, f"reference/commands/{name}.md", content=text))
    return files


def _zoo():
    """Yield the lines of the table of models with checkpoints."""
    yield "---\nhide: [toc]\n---\n\n# Models with checkpoints\n"
    yield "`keras_vit.from_checkpoint` and `--checkpoint` accept the names in the last column. Parameters are for"
    yield "1,000 classes, multiply-adds for one image of the size of the second column (many tables call them GFLOPs)."
    timed = json.loads(pathlib.Path(__file__).with_name("zoo.json").read_text())
    yield "ImageNet: the best published top-1 accuracy of a checkpoint. CPU: milliseconds for one image in float32 on"
    yield f"{timed['cores']} cores ({timed['processor']}, {timed['date']}; `python -m docs.zoo`), medians of"
    yield "five, up to 100 GMACs; models with equal products differ by up to half on this machine.\n"
    yield "| model | pixels | parameters | GMACs | CPU, ms | ImageNet | for | license | checkpoints |"
    yield "|---|---:|---:|---:|---:|---:|---|---|---|"
    for model in find_models(pretrained=True):
        accuracy = f"{model.accuracy:.1f}%" if model.accuracy else ""
        seconds = timed["milliseconds"].get(model.name, "")
        size = f"{model.pixels} | {model.millions:,.1f} M | {model.gmacs:,.1f} | {seconds}"
        names = "<br>".join(f"`{name}`" for name in model.checkpoints)
        yield f"| {model.name} | {size} | {accuracy} | {model.purpose} | {model.license} | {names} |"


def _options(module, arguments):
    """Return the Markdown tables that a command prints of its options."""
    printed = io.StringIO()
    as_table = mock.patch.dict(os.environ, {OPTIONS_ALONE: "table"})
    with as_table, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(arguments)
    return printed.getvalue()


def on_page_content(html, **_):
    """Keep each option of a code span or block on one line."""
    return _CODE.sub(lambda code: _TEXT.sub(_whole_options, code[0]), html)


def _whole_options(text):
    return _OPTION.sub(r'<span class="whole">\g<0></span>', text[0])
