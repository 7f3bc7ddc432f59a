"""Which files of a folder are images."""

import io

import PIL.Image

from keras_vit.images.formats import format_list, format_problem, image_files


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    PIL.Image.new("RGB", (4, 3)).save(stream, kind)
    return stream.getvalue()


def test_images_are_found_by_content_in_all_visible_subfolders(tmp_path):
    for name in ("b.png", "a/no_ending", "a/b/c.PNG", ".hidden.png", ".cache/d.png", "a/.b/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded("PNG"))
    (tmp_path / "a" / "notes.png").write_text("no image")
    (tmp_path / "empty.png").touch()
    (tmp_path / "z.tif").write_bytes(encoded("TIFF"))
    (tmp_path / "folder.png").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in image_files(tmp_path)] == ["a/b/c.PNG", "a/no_ending", "b.png"]


def test_a_format_that_people_have_is_named_with_what_to_do():
    for data, kind in ((encoded("TIFF"), "TIFF"), (encoded("PDF"), "PDF"), (b"\0\0\0\x18ftypheic\0\0", "HEIC")):
        assert format_problem(data).endswith(f", but a {kind} file; save it as JPEG")
    for data in (b"notes", b"", b"\0\0\0\x18ftypisom"):
        assert format_problem(data) == f"not {format_list()}"
