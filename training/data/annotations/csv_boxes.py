"""Boxes in a CSV file, a row for each. No TensorFlow; no file is trusted."""

import csv
import io
import pathlib
from collections.abc import Iterator, Mapping

from keras_vit import UserError
from keras_vit.errors import reading
from keras_vit.files.documents import LARGEST, read_text
from keras_vit.files.labels import composed
from keras_vit.files.tables import cell_of_csv
from training.data.annotations.boxes import Annotated, Annotations, Box, annotations_of
from training.data.annotations.listed_images import number_of, own_labels, upright_size
from training.data.listed_files import check_listed, listed_file


def read_csv_boxes(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> Annotations:
    """A row for each box: path, x, y, w, h, label; one with a path alone for a picture without objects."""
    boxes: dict[pathlib.Path, list[Box]] = {}
    for number, row in _csv_rows(file):
        of_picture = boxes.setdefault(listed_file(folder, row["path"]), [])
        texts = [row[name] for name in ("x", "y", "w", "h")]
        has_box = any((*texts, row["label"]))
        if not row["path"] or (has_box and not row["label"]):
            raise UserError(f"Line {number} of {file} should name a picture, and the class of a box; complete it.")
        if not has_box:
            continue
        x, y, w, h = (number_of(text, f"Each of x, y, w and h in line {number} of {file}") for text in texts)
        of_picture.append(Box(composed(row["label"]), (x, y, w, h)))
    check_listed(boxes, file, folder, allow_outside)
    images = [Annotated(image, upright_size(image), own) for image, own in boxes.items()]
    return annotations_of(images, own_labels(folder))


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    reader = csv.DictReader(io.StringIO(read_text(file, LARGEST), newline=""))
    needed = ("path", "x", "y", "w", "h", "label")
    with reading(file, "CSV", csv.Error):
        names = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        rows = [(reader.line_num, row) for row in reader]
    if any(names.count(name) != 1 for name in needed):
        raise UserError(
            f"{file} should begin with the columns {','.join(needed)}, once each and with commas between them, but "
            f"begins with {','.join(names)!r:.60}; correct it."
        )
    for number, row in rows:
        if any(row.values()):
            if None in row or None in row.values():
                raise UserError(f"Line {number} of {file} should have {len(names)} values, as the header; correct it.")
            yield number, {name: cell_of_csv(text.strip()) for name, text in row.items()}
