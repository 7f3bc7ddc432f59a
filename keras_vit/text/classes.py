"""The classes of a model of texts, checked before Keras is imported."""

import os
from collections.abc import Mapping, Sequence

from keras_vit.errors import UserError
from keras_vit.files.labels import distinct_names, read_labels
from keras_vit.files.remote import existing_file
from keras_vit.models.config import Classes

# The sentences that the published zero-shot figures were measured with: the 80 for ImageNet of OpenAI's notebook
# Prompt_Engineering_for_ImageNet.ipynb, and the one of the model cards of SigLIP.
_CLIP = """
a bad photo of a {}. | a photo of many {}. | a sculpture of a {}. | a photo of the hard to see {}. | a low
resolution photo of the {}. | a rendering of a {}. | graffiti of a {}. | a bad photo of the {}. | a cropped photo of
the {}. | a tattoo of a {}. | the embroidered {}. | a photo of a hard to see {}. | a bright photo of a {}. | a photo
of a clean {}. | a photo of a dirty {}. | a dark photo of the {}. | a drawing of a {}. | a photo of my {}. | the
plastic {}. | a photo of the cool {}. | a close-up photo of a {}. | a black and white photo of the {}. | a painting
of the {}. | a painting of a {}. | a pixelated photo of the {}. | a sculpture of the {}. | a bright photo of the {}.
| a cropped photo of a {}. | a plastic {}. | a photo of the dirty {}. | a jpeg corrupted photo of a {}. | a blurry
photo of the {}. | a photo of the {}. | a good photo of the {}. | a rendering of the {}. | a {} in a video game. | a
photo of one {}. | a doodle of a {}. | a close-up photo of the {}. | a photo of a {}. | the origami {}. | the {} in
a video game. | a sketch of a {}. | a doodle of the {}. | a origami {}. | a low resolution photo of a {}. | the toy
{}. | a rendition of the {}. | a photo of the clean {}. | a photo of a large {}. | a rendition of a {}. | a photo of
a nice {}. | a photo of a weird {}. | a blurry photo of a {}. | a cartoon {}. | art of a {}. | a sketch of the {}. |
a embroidered {}. | a pixelated photo of a {}. | itap of the {}. | a jpeg corrupted photo of the {}. | a good photo
of a {}. | a plushie {}. | a photo of the nice {}. | a photo of the small {}. | a photo of the weird {}. | the
cartoon {}. | art of the {}. | a drawing of the {}. | a photo of the large {}. | a black and white photo of a {}. |
the plushie {}. | a dark photo of a {}. | itap of a {}. | graffiti of the {}. | a toy {}. | itap of my {}. | a photo
of a cool {}. | a photo of a small {}. | a tattoo of the {}.
"""
TEMPLATES: dict[str, tuple[str, ...]] = {
    "clip": tuple(" ".join(sentence.split()) for sentence in _CLIP.split("|")),
    "siglip": ("This is a photo of {}.",),
}
_PLAIN = ("{}",)
# Between a name and its texts, and between these, in a line of a file.
_NAME_END, _SEPARATOR = ": ", " | "


def text_classes(
    classes: Sequence[str] | Mapping[str, str | Sequence[str]], templates: str | Sequence[str] | None = None
) -> Classes:
    """The classes of `keras_vit.zero_shot`. Raises UserError for empty texts, equal names and templates without {}."""
    if not isinstance(classes, Mapping):
        names = [classes] if isinstance(classes, str) else list(classes)
        distinct_names([name for name in names if isinstance(name, str) and name.strip()], "The list of classes")
        classes = {name: name for name in names}
    texts = {name: tuple(each) if isinstance(each, list | tuple) else (each,) for name, each in classes.items()}
    for name, several in texts.items() or [("", ())]:
        if not several or not all(isinstance(text, str) and text.strip() for text in (name, *several)):
            raise UserError(f"Each class needs a text, but {name!r:.80} is empty or has an empty one; give it one.")
    return Classes(tuple(texts), tuple(texts.values()), templates_of(templates))


def templates_of(templates: str | Sequence[str] | None) -> tuple[str, ...]:
    """The templates, of a name, a sentence or several. Raises UserError for one without {}."""
    if templates is None:
        return _PLAIN
    sentences = TEMPLATES.get(templates, (templates,)) if isinstance(templates, str) else tuple(templates)
    if wrong := [template for template in sentences or ("",) if not isinstance(template, str) or "{}" not in template]:
        raise UserError(
            "A template must have {} where the class goes, such as 'a photo of a {}.', or be one of "
            f"{', '.join(TEMPLATES)}, but is {wrong[0]!r:.80}."
        )
    return sentences


def is_text_file(values: Sequence[str]) -> bool:
    """Whether the values of --classes or --templates are one name of a text file."""
    return len(values) == 1 and values[0].endswith(".txt")


def classes_of_options(values: Sequence[str], templates: Sequence[str] | None) -> Classes:
    """The classes of --classes, texts or .txt files with lines as `cat: a cat | a kitten`, and of --templates."""
    classes = [each for value in values for each in _classes_of(value)]
    distinct_names([name for name, _ in classes if name.strip()], "--classes")
    return text_classes(dict(classes), templates_of_option(templates))


def templates_of_option(templates: Sequence[str] | None) -> tuple[str, ...] | None:
    """The templates of the option --templates; None without it."""
    if templates is None:
        return None
    if is_text_file(templates):
        return templates_of(_lines("--templates", templates[0]))
    return templates_of(templates[0] if len(templates) == 1 else templates)


def classes_of_labels(labels: Sequence[str], templates: Sequence[str] | None) -> Classes:
    """The classes of a data set, whose names are texts with spaces for underscores."""
    texts = {label: (label.replace("_", " "),) for label in labels}
    return text_classes(texts, templates_of_option(templates))


def _classes_of(value: str) -> list[tuple[str, tuple[str, ...]]]:
    is_file = is_text_file((value,))
    return [_class_of(line) for line in _lines("--classes", value)] if is_file else [(value, (value,))]


def _class_of(line: str) -> tuple[str, tuple[str, ...]]:
    name, named, texts = f"{line} ".partition(_NAME_END)  # the lines have no white space at their ends
    return name.strip(), tuple(text.strip() for text in (texts if named else name).split(_SEPARATOR))


def _lines(option: str, file: str | os.PathLike) -> tuple[str, ...]:
    lines = read_labels(existing_file(file, f"{option} accepts texts, or a text file with one per line"))
    return tuple(line.strip() for line in lines if line.strip())
