"""Files that a file of others names: found in every form of their names, and inside of the folder that the user named.

Imports neither TensorFlow nor NumPy.
"""

import os
import pathlib
import unicodedata
from collections.abc import Collection, Iterable

from keras_vit.errors import UserError, shown

# Files that a message names.
_MOST_NAMED = 3


def listed_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the normalized path of a file that is named relative to a folder.

    The name is taken as it is written or, if only that exists, with slashes for backslashes (Windows) or with letters
    and accents as one character or as two (macOS). Raises UserError for a name with a zero character.
    """
    if "\0" in name:
        raise UserError(f"The file name {shown(name)} has a zero character; correct it.")
    slashed = name.replace("\\", "/")
    others = (slashed, unicodedata.normalize("NFC", slashed), unicodedata.normalize("NFD", slashed))
    paths = [os.path.normpath(folder / form) for form in dict.fromkeys((name, *others))]
    if len(paths) > 1:
        return pathlib.Path(next(filter(os.path.lexists, paths), os.path.normpath(folder / slashed)))
    return pathlib.Path(paths[0])


def check_listed(files: Collection[pathlib.Path], source: object, folder: pathlib.Path, allow_outside: bool) -> None:
    """Raise UserError unless all files that a source names are there, and inside of the folder; links count by target.

    Args:
        files: paths by `listed_file`.
        source: the file that names them, for the message.
        folder: that the user named.
        allow_outside: whether `--allow-outside` was given.
    """
    check_inside(files, source, folder, allow_outside)
    if missing := [path.name for path in files if not os.path.isfile(path)]:
        raise UserError(
            f"{len(missing)} of {len(files)} images that {source} names are not in {folder}, such as "
            f"{', '.join(map(_name, missing[:_MOST_NAMED]))}; give their folder by --images, or "
            "correct the paths."
        )


def check_inside(files: Iterable[pathlib.Path], source: object, folder: pathlib.Path, allow_outside: bool) -> None:
    """Raise UserError for files outside of a folder, and for links that lead out of it; see `check_listed`."""
    if allow_outside:
        return
    root, parents = os.path.realpath(folder), dict[pathlib.Path, str]()
    outside = list[tuple[pathlib.Path, str]]()
    for path in files:
        if path.parent not in parents:
            parents[path.parent] = os.path.realpath(path.parent)
        real = os.path.realpath(path) if os.path.islink(path) else os.path.join(parents[path.parent], path.name)
        if real != root and not real.startswith(os.path.join(root, "")):
            outside.append((path, real))
    if outside:
        path, real = outside[0]
        link = f" (a link to {_name(real)})" if path.is_relative_to(os.path.normpath(folder)) else ""
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UserError(
            f"{source} names {_name(path.name) if link else _name(path)}{link}{more}, outside of {folder}; copy them "
            "into it, or give --allow-outside if you trust the file."
        )


def _name(path: object) -> str:
    """A path for a message, cut and without control characters."""
    return shown(str(path))[1:-1]
