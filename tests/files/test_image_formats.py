"""Which files of a folder are images."""

import io

import PIL.Image

from keras_vit.files.image_formats import image_files


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
