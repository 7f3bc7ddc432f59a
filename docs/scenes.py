"""Make images with masks and boxes for the gallery: stamps of Tux Paint on photos of the ground.

stamps: the folder share/tuxpaint/stamps of Debian's package tuxpaint-stamps-default. grounds: the folder skimage/data
of scikit-image, with gravel.png, grass.png and brick.png.
"""

import csv
import pathlib

import numpy as np
import PIL.Image

CLASSES = {"bird": "animals/birds", "coin": "symbols/money", "fruit": "food/fruit", "insect": "animals/insects"}
SIDE = 224  # of a scene, in pixels
GROUNDS = ("gravel", "grass", "brick")


def make_scenes(stamps: pathlib.Path, grounds: pathlib.Path, folder: pathlib.Path, count: int = 240) -> None:
    """Write scenes/images, scenes/masks, scenes/labels.txt and boxes.csv, and new-scenes with other stamps."""
    rng = np.random.default_rng(0)
    photos = [PIL.Image.open(grounds / f"{name}.png").convert("RGB") for name in GROUNDS]
    objects = {name: sorted((stamps / place).rglob("*.png")) for name, place in CLASSES.items()}
    unseen = {name: files[::5] for name, files in objects.items()}
    seen = {name: [file for file in files if file not in unseen[name]] for name, files in objects.items()}
    places = [folder / "scenes" / "images", folder / "scenes" / "masks", folder / "new-scenes"]
    for place in places:
        place.mkdir(parents=True)
    rows = []
    for number in range(count):
        scene, mask, boxes = draw_scene(rng, photos, seen)
        scene.save(places[0] / f"{number:03}.png")
        mask.save(places[1] / f"{number:03}.png")
        rows += [(f"scenes/images/{number:03}.png", *box) for box in boxes]
    for number in range(6):
        draw_scene(rng, photos, unseen)[0].save(places[2] / f"{number}.png")
    with (folder / "boxes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "x", "y", "w", "h", "label"), *rows])
    (folder / "scenes" / "labels.txt").write_text("\n".join(["ground", *CLASSES]) + "\n")


def draw_scene(
    rng: np.random.Generator, photos: list, objects: dict
) -> tuple[PIL.Image.Image, PIL.Image.Image, list[tuple[int, int, int, int, str]]]:
    """Return a scene of two to four objects, its mask of class numbers, and each object's box and class."""
    scene = cut(rng, photos[rng.integers(len(photos))], SIDE, (0, 512 - SIDE))
    mask = PIL.Image.new("L", scene.size)
    boxes = []
    corners = [(x, y) for x in (0, SIDE // 2) for y in (0, SIDE // 2)]
    for corner in rng.permutation(corners)[: rng.integers(2, 5)]:
        label = int(rng.integers(len(CLASSES)))
        name = list(CLASSES)[label]
        files = objects[name]
        stamp = open_stamp(files[rng.integers(len(files))], int(rng.integers(60, 105)))
        left, top = (
            int(rng.integers(low, low + SIDE // 2 - side + 1)) for low, side in zip(corner, stamp.size, strict=True)
        )
        scene.paste(stamp, (left, top), stamp)
        mask.paste(label + 1, (left, top), stamp.getchannel("A").point(lambda value: 255 * (value > 127)))
        boxes.append((left, top, *stamp.size, name))
    return scene, mask, boxes


def make_gravel(stamps: pathlib.Path, grounds: pathlib.Path, folder: pathlib.Path, count: int = 40) -> None:
    """Write good, pieces of gravel, and belt, other pieces, some of them with a thing that does not belong there."""
    rng = np.random.default_rng(0)
    gravel = PIL.Image.open(grounds / "gravel.png").convert("RGB")
    for place in ("good", "belt"):
        (folder / place).mkdir(parents=True)
    for number in range(count):
        cut(rng, gravel, 128, (0, 256)).save(folder / "good" / f"{number:02}.png")
    things = ("symbols/money/japanese/yen005", "animals/insects/Woodlouse", "animals/insects/grasshopper")
    for number, stamp in enumerate([*things, None, None]):
        piece = cut(rng, gravel, 128, (384, 384))
        if stamp is not None:
            thing = open_stamp(stamps / f"{stamp}.png", 40)
            piece.paste(thing.convert("L").convert("RGB"), (46, 46), thing)
        piece.save(folder / "belt" / f"{number}.png")


def cut(rng: np.random.Generator, ground: PIL.Image.Image, side: int, lefts: tuple[int, int]) -> PIL.Image.Image:
    """Return a random square of the ground, whose left edge is in a range."""
    left, top = rng.integers(lefts[0], lefts[1] + 1), rng.integers(ground.height - side + 1)
    return ground.crop((left, top, left + side, top + side))


def open_stamp(file: pathlib.Path, side: int) -> PIL.Image.Image:
    """Return a stamp without its transparent margin, its longer side of this many pixels."""
    stamp = PIL.Image.open(file).convert("RGBA")
    stamp = stamp.crop(stamp.getchannel("A").point(lambda value: 255 * (value > 127)).getbbox())
    scale = side / max(stamp.size)
    return stamp.resize([max(1, round(scale * length)) for length in stamp.size])
