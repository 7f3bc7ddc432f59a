"""Images that belong together: which do, and that a drawn split has each group on one side."""

import io
import json
import pathlib
import shutil
import tarfile

import numpy as np
import PIL.Image
import PIL.ImageFilter
import pytest

from keras_vit import UserError
from keras_vit.run import Run
from training.checks import with_data
from training.data.annotations.open_boxes import open_boxes
from training.data.annotations.open_scenes import open_scenes
from training.data.groups import groups_of, held_out, look_at, looks_of
from training.data.known_images import check_group, check_held_out
from training.data.sources import open_source
from training.options.common import AnnotatedData, DataOptions
from training.options.dense import BoxesOptions, SceneOptions


def scene(seed: int, size: int = 96) -> PIL.Image.Image:
    """A smooth image with the colors of a seed."""
    colors = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return PIL.Image.fromarray(colors).resize((size, size), PIL.Image.Resampling.BICUBIC)


def shots(seed: int) -> list[PIL.Image.Image]:
    """Near copies of a scene: darker, blurred, and smaller."""
    image = scene(seed)
    darker = PIL.Image.fromarray((np.asarray(image) * 0.8).astype(np.uint8))
    return [image, darker, image.filter(PIL.ImageFilter.GaussianBlur(1.0)), image.resize((64, 64))]


def save(folder: pathlib.Path, name: str, image: PIL.Image.Image, **options) -> str:
    """Write an image, and return its path."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, **options)
    return str(file)


def grouped(folder: pathlib.Path, files: list[str], rule: str = "auto") -> list[int]:
    looks = [look_at(pathlib.Path(file).read_bytes()) for file in files]
    return groups_of([str(pathlib.Path(file).relative_to(folder)) for file in files], rule, looks).tolist()


def test_near_copies_belong_together_and_other_images_do_not(tmp_path):
    images = [image for seed in range(12) for image in shots(seed)]
    files = [save(tmp_path, f"{number:02}.png", image) for number, image in enumerate(images)]
    files.append(save(tmp_path, "saved again.jpg", scene(3), quality=70))
    numbers = grouped(tmp_path, files)
    assert numbers[:48] == np.repeat(numbers[:48:4], 4).tolist()
    assert len({*numbers}) == 12
    assert numbers[48] == numbers[12]


def test_images_of_one_color_and_transparent_ones_are_no_copies(tmp_path):
    plain = [save(tmp_path, f"{level}.png", PIL.Image.new("RGB", (9, 9), (level, 9, 9))) for level in (0, 99, 200)]
    for name, seed in (("a", 1), ("b", 2)):  # only the alpha differs
        alpha = scene(seed).convert("L")
        image = PIL.Image.merge("RGBA", (*PIL.Image.new("RGB", alpha.size).split(), alpha))
        plain.append(save(tmp_path, f"{name}.png", image))
    assert len({*grouped(tmp_path, plain)}) == 5


def test_an_image_that_may_not_be_read_has_no_look(tmp_path):
    folder = tmp_path / "a.png"
    folder.mkdir()  # whose bytes cannot be read, like those of a file without the permission
    assert looks_of(lambda row: [folder, tmp_path / "missing.png"][row].read_bytes(), 2) == [None, None]


def test_a_burst_is_of_one_camera_within_a_minute(tmp_path):
    taken = [
        ("A", "10:00:00"),
        ("A", "10:00:50"),
        ("A", "10:01:40"),
        ("A", "10:05:00"),
        ("B", "10:00:20"),
        ("A", "bad"),
    ]
    files = []
    for number, (camera, time) in enumerate(taken):
        exif = PIL.Image.Exif()
        exif[0x0110] = camera
        exif.get_ifd(0x8769)[0x9003] = f"2026:05:01 {time}"
        files.append(save(tmp_path, f"{number}.jpg", scene(number), exif=exif))
    first, second, third, *others = grouped(tmp_path, files)
    assert first == second == third
    assert len({first, *others}) == 4


def test_names_group_by_folder_or_by_the_first_group_of_an_expression(tmp_path):
    names = ("cat/p1/a.png", "cat/p1/b.png", "dog/p1/c.png", "dog/p2/d.png", "dog/e.png")
    files = [save(tmp_path, name, scene(number)) for number, name in enumerate(names)]
    one, two, three, four, five = grouped(tmp_path, files, "folder")
    assert one == two
    assert len({one, three, four, five}) == 4
    one, two, three, four, five = grouped(tmp_path, files, r"p(\d)/")
    assert one == two == three
    assert len({one, four, five}) == 3
    with pytest.raises(UserError, match=r"fits no file, such as cat/p1/a\.png"):
        grouped(tmp_path, files, "patient")
    with pytest.raises(UserError, match="regular expression"):
        grouped(tmp_path, files, "(")


def test_groups_are_whole_and_a_tenth_of_each_class_is_kept():
    labels = np.repeat(np.arange(3), 200)
    groups = np.random.default_rng(0).integers(0, 60, 600) + 60 * labels
    kept = held_out(labels, "abc", groups, insist=True)
    assert not {*groups[kept]} & {*groups[~kept]}
    assert all(20 <= kept[labels == label].sum() <= 30 for label in range(3))


def test_a_large_group_is_trained_on_unless_there_are_no_others(capsys):
    labels, rows = np.zeros(40, np.int64), np.arange(40)
    assert not {0, 29} & {*np.flatnonzero(held_out(labels, "a", np.maximum(rows - 29, 0), insist=True))}
    assert held_out(labels, "a", rows // 20, insist=True).sum() == 20
    with pytest.raises(UserError, match=r"40 images of 'a' belong together"):
        held_out(labels, "a", labels, insist=True)
    assert np.flatnonzero(held_out(labels, "a", labels, insist=False)).tolist() == [0, 10, 20, 30]
    assert "Warning: The 40 images of 'a' belong together" in capsys.readouterr().out


@pytest.fixture(name="all_shots", scope="module")
def _all_shots(tmp_path_factory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("shots")
    for label in ("cat", "dog"):
        for seed in range(9):
            for number, image in enumerate(shots(seed + 100 * (label == "dog"))):
                save(place, f"{label}/shot{number}-scene{seed}.png", image)
    return place


@pytest.fixture(name="folder")
def _folder(all_shots, tmp_path) -> pathlib.Path:
    """Two classes of nine scenes in four shots each, which lie far apart by name."""
    return shutil.copytree(all_shots, tmp_path / "pictures")


def scenes(split) -> set[str]:
    return {
        split.name(number).rpartition("-")[2] + split.name(number).split("/")[-2]
        for number in range(split.num_examples)
    }


@pytest.mark.parametrize("seed", [None, 1])
def test_a_drawn_split_has_each_scene_on_one_side(seed, folder, capsys):
    source = open_source(DataOptions(f"folder:{folder}", split_seed=seed))
    assert not scenes(source.train) & scenes(source.evaluation)
    assert len(scenes(source.evaluation)) == 2
    groups = np.concatenate([source.train.groups, source.evaluation.groups])
    assert len(np.unique(groups)) == 18
    assert len(np.unique(source.evaluation.take(np.arange(3)).groups)) == 1
    assert "72 images belong together in 18 groups" in capsys.readouterr().out
    alone = open_source(DataOptions(f"folder:{folder}", split_seed=seed, group="none"))
    assert scenes(alone.train) & scenes(alone.evaluation)


def test_lists_of_several_classes_have_each_scene_on_one_side(folder):
    lines = [f"pictures/{file.relative_to(folder)},{file.parent.name}|all" for file in sorted(folder.rglob("*.png"))]
    (folder.parent / "list.csv").write_text("path,labels\n" + "\n".join(lines))
    source = open_source(DataOptions(f"csv:{folder.parent / 'list.csv'}"), multi_label=True)
    assert not scenes(source.train) & scenes(source.evaluation)


def test_a_column_names_groups(folder):
    files = sorted(folder.rglob("*.png"))
    lines = [f"pictures/{file.relative_to(folder)},{file.parent.name},day {file.name[4]}" for file in files]
    (folder.parent / "list.csv").write_text("path,label,group\n" + "\n".join(lines))
    with pytest.raises(UserError, match="36 images of 'cat' belong together"):  # every scene was taken on every day
        open_source(DataOptions(f"csv:{folder.parent / 'list.csv'}"))


def test_a_class_of_copies_alone_is_split_as_ever_with_a_warning(tmp_path, capsys):
    for number in range(4):
        save(tmp_path, f"{'cat' if number < 2 else 'dog'}/{number}.png", scene(number // 2))
    source = open_source(DataOptions(f"folder:{tmp_path}"))
    assert (source.train.num_examples, source.evaluation.num_examples) == (2, 2)
    assert "Warning: The 2 images of 'cat' belong together" in capsys.readouterr().out


def test_images_without_groups_are_split_as_ever(tmp_path):
    for number in range(24):
        save(tmp_path, f"{'even' if number % 2 == 0 else 'odd'}/{number:02}.png", scene(number))
    for seed in (None, 3):
        splits = [
            open_source(DataOptions(f"folder:{tmp_path}", split_seed=seed, group=rule)) for rule in ("auto", "none")
        ]
        names = [[part.name(k) for k in range(part.num_examples)] for part in (each.evaluation for each in splits)]
        assert names[0] == names[1]
        assert splits[0].fingerprint == splits[1].fingerprint


def test_old_runs_keep_their_split_and_new_ones_say_how_they_were_drawn(folder, tmp_path):
    new = DataOptions(f"folder:{folder}", group=r"scene\d").settings()
    old = {name: value for name, value in new.items() if name != "group"}
    assert DataOptions.of_settings(new).group == r"scene\d"
    assert DataOptions.of_settings(old).group == "none"
    assert DataOptions.of_settings({"data": "digits"}) == DataOptions("digits")
    assert "group" not in DataOptions("digits").settings()
    assert "group" not in DataOptions(f"folder:{folder}", group="none").settings()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.keras").touch()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {"source": old}}))
    assert with_data({("run",): str(tmp_path / "run")})[("source", "group")] == "none"
    assert Run.at(tmp_path / "run").data_options[-2:] == ["--group", "none"]
    alone = open_source(DataOptions(f"folder:{folder}", group="none"))
    images = {"train": alone.train.num_examples, "evaluation": alone.evaluation.num_examples}
    config = {"settings": {"source": old, "images": images}, "images_fingerprint": alone.fingerprint}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    run, options = Run.at(tmp_path / "run"), DataOptions(f"folder:{folder}")
    with pytest.raises(UserError, match="give --group none, as in training"):
        check_held_out(run, options, open_source(options))


def names_of(split) -> list[str]:
    return [split.name(number) for number in range(split.num_examples)]


def write_tar(folder: pathlib.Path) -> str:
    """The images of the folder in a tar file, each with its class beside it, and three names that are not grouped."""
    with tarfile.open(folder.parent / "pictures.tar", "w") as tar:
        for file in sorted(folder.rglob("*.png")):
            name = f"{'a-long-folder/' * 10}{file.relative_to(folder).with_suffix('')}"
            for ending, content in (("png", file.read_bytes()), ("cls", file.parent.name.encode())):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return f"tar:{folder.parent / 'pictures.tar'}"


@pytest.mark.parametrize("rule", ["auto", r"scene\d"])
def test_tar_files_have_each_scene_on_one_side(rule, folder, monkeypatch):
    data = write_tar(folder)
    if rule != "auto":  # by their names alone
        monkeypatch.setattr("training.data.tar.MOST_COMPARED", 10)
    splits = open_source(DataOptions(data, group=rule))
    groups = [split.groups for split in (splits.train, splits.evaluation)]
    assert len(np.unique(np.concatenate(groups))) == (18 if rule == "auto" else 9)
    assert not {*groups[0]} & {*groups[1]}
    alone = open_source(DataOptions(data, group="none"))
    assert (alone.train.groups, alone.evaluation.num_examples) == (None, 8)
    assert DataOptions.of_settings({"data": data}).group == "none"


def write_boxes(folder: pathlib.Path, kind: str, field: str) -> str:
    """A file of one box in each image of the folder; with `field`, of the group, which is the number of the shot."""
    files = [file.relative_to(folder) for file in sorted(folder.rglob("*.png"))]
    if kind == "csv":
        lines = [f"{file},1,1,20,20,{file.parent}" + (f",{file.name[4]}" if field else "") for file in files]
        (folder / "boxes.csv").write_text(f"path,x,y,w,h,label{',group' if field else ''}\n" + "\n".join(lines))
        return f"csv:{folder / 'boxes.csv'}"
    named = [{"group": int(file.name[4])} if field else {} for file in files]
    mask = {"category_id": 1, "bbox": [1, 1, 20, 20], "segmentation": [[1, 1, 21, 1, 21, 21, 1, 21]]}
    document = {
        "images": [{"id": number, "file_name": str(file)} | named[number] for number, file in enumerate(files)],
        "annotations": [{"image_id": number, **mask} for number in range(len(files))],
        "categories": [{"id": 1, "name": "scene"}],
    }
    (folder / "boxes.json").write_text(json.dumps(document))
    return f"coco:{folder / 'boxes.json'}"


@pytest.mark.parametrize("kind", [pytest.param("csv", marks=pytest.mark.slow), "coco", "masks"])
def test_images_with_boxes_or_masks_have_each_scene_on_one_side(kind, folder):
    def sides(data: str, **options) -> tuple[list[str], list[str]]:
        if kind == "masks":
            source = open_scenes(SceneOptions(data=data, **options), "semantic")
            return names_of(source.train), names_of(source.evaluation)
        boxes = open_boxes(BoxesOptions(data=data, **options))
        return [str(image.file) for image in boxes.train], [str(image.file) for image in boxes.evaluation]

    def shared(both: tuple[list[str], list[str]], part: slice) -> set[str]:
        train, evaluation = ({name.rpartition("/")[2][part] for name in names} for names in both)
        return train & evaluation

    data = write_boxes(folder, kind, "")
    scene_of = slice(6, None)
    for rule in ("auto", r"scene\d"):
        split = sides(data, group=rule)
        assert len(split[1]) in (8, 16)
        assert rule == "auto" or not shared(split, scene_of)
    train, evaluation = sides(data, group="none")
    assert shared((train, evaluation), scene_of)
    assert len(evaluation) == 8
    assert len(sides(data, group="folder")[1]) == 36
    with pytest.raises(UserError, match="72 images of 'boxes.* belong together"):
        sides(write_boxes(folder, kind, "group"))


def test_runs_on_boxes_are_measured_on_the_images_of_their_split(tmp_path):
    old = {"data": "csv:boxes.csv", "bad_boxes": "refuse"}
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"source": old}}))
    (tmp_path / "model.keras").touch()
    assert "group" not in AnnotatedData(data="csv:boxes.csv", group="none").settings()
    assert "group" not in SceneOptions(data="tfds:scenes").settings()
    check_group(Run.at(tmp_path), AnnotatedData(data="csv:boxes.csv"), is_drawn=False)
    check_group(Run.at(tmp_path), AnnotatedData(data="csv:boxes.csv", group="none"), is_drawn=True)
    with pytest.raises(UserError, match="give --group none, as in training"):
        check_group(Run.at(tmp_path), AnnotatedData(data="csv:boxes.csv"), is_drawn=True)
