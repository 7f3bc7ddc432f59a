"""Which files of a folder are images."""

import PIL.Image

from keras_vit.images.formats import format_list, format_problem, image_files, looks_like_image
from tests.support import encoded

IMAGE = PIL.Image.new("RGB", (4, 3))


def test_images_are_found_by_content_in_all_visible_subfolders(tmp_path):
    for name in ("b.png", "a/no_ending", "a/b/c.PNG", ".hidden.png", ".cache/d.png", "a/.b/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded(IMAGE, "PNG"))
    (tmp_path / "a" / "notes.png").write_text("no image")
    (tmp_path / "empty.png").touch()
    (tmp_path / "z.tif").write_bytes(encoded(IMAGE, "TIFF"))
    (tmp_path / "moving.gif").write_bytes(encoded(IMAGE, "GIF"))
    (tmp_path / "folder.png").mkdir()
    names = [str(path.relative_to(tmp_path)) for path in image_files(tmp_path)]
    assert names == ["a/b/c.PNG", "a/no_ending", "b.png", "moving.gif"]


def test_a_format_that_people_have_is_named_with_what_to_do():
    for kind in ("TIFF", "AVIF", "PPM"):
        assert f"{kind} file; convert the folder by keras-vit prepare" in format_problem(encoded(IMAGE, kind))
    assert "but a HEIC file; convert" in format_problem(b"\0\0\0\x18ftypheic\0\0")
    assert format_problem(encoded(IMAGE, "PDF")).endswith(", but a PDF file; save it as JPEG")
    for data in (b"notes", b"\0\0\0\x18ftypisom"):
        assert format_problem(data) == f"not {format_list()}"
    assert format_problem(b"") == "the file is empty"


def test_of_files_with_other_endings_only_the_first_bytes_decide(tmp_path):
    for name, content, image in (
        ("a.txt", b"BMW and other cars", False),
        ("b.txt", b"GIF8 is a beginning", False),
        ("c.dat", encoded(IMAGE, "BMP"), True),
        ("d.php", encoded(IMAGE, "GIF"), True),
        ("e.ogg", b"OggS" + bytes(40), False),
        ("f.png", b"", True),
        ("g", encoded(IMAGE, "TIFF"), True),
        ("h.dng", encoded(IMAGE, "TIFF"), False),
    ):
        (tmp_path / name).write_bytes(content)
        assert looks_like_image(tmp_path / name) is image, name
    assert [path.name for path in image_files(tmp_path)] == ["c.dat", "d.php"]
