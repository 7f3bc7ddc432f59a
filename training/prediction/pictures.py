"""Find image files by the names of files and folders and by patterns. Imports neither TensorFlow nor Keras."""

import pathlib
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.files.remote import matching
from keras_vit.images.formats import format_list, is_hidden, is_picture, others_line, visible_files


def find_pictures(names: Sequence[str]) -> list[pathlib.Path]:
    """Return the files, each once: those of a folder in alphabetical order, without hidden ones and without files that
    neither are called like a picture nor hold one. Links in a folder that lead to a folder, which are not followed, or
    nowhere are among them, since `predict` names what it cannot read.

    Raises UserError for a name without files. Whether a file can be decoded is not checked.
    """
    found: dict[pathlib.Path, None] = {}
    for name in names:
        files = _files(name)
        if not files and pathlib.Path(name).is_dir():
            raise UserError(f"The folder {name!r} has no picture of a supported format ({format_list()}).")
        if not files:
            raise UserError(
                f"There is no picture {name!r}; give files, folders that contain {format_list()}, or patterns such as "
                "'pictures/*.png'."
            )
        found |= dict.fromkeys(files)
    return list(found)


def only_folder(names: Sequence[str]) -> pathlib.Path | None:
    """The folder that was given alone, to which paths are shown relative; None for anything else."""
    return pathlib.Path(names[0]) if len(names) == 1 and pathlib.Path(names[0]).is_dir() else None


def _files(name: str) -> list[pathlib.Path]:
    path = pathlib.Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        # A file that is called like a picture and is none is named in the results.
        files = visible_files(path)
        pictures = {file for file in files if is_picture(file)}
        if pictures and len(pictures) < len(files):
            print(others_line([file.name for file in files if file not in pictures], name))
        return sorted(pictures | {link for link in path.rglob("*") if link.is_symlink() and _is_lost(link, path)})
    return sorted(pathlib.Path(match) for match in matching(name) if pathlib.Path(match).is_file())


def _is_lost(link: pathlib.Path, folder: pathlib.Path) -> bool:
    return not link.is_file() and is_picture(link) and not any(map(is_hidden, link.relative_to(folder).parts))
