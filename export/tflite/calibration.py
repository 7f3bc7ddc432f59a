"""Which images calibrate a TFLite file: those of a folder, or the training images that a run keeps."""

from collections.abc import Sequence

from export.options import CALIBRATED, TFLiteOptions
from export.source import read_folder
from export.tflite.quantize import EIGHT_BIT_WEIGHTS
from keras_vit import UserError
from keras_vit.images.samples import Samples
from keras_vit.run import CALIBRATION, Run

# Images if no number is given.
_MOST_IMAGES = 256


def read_calibration(run: Run, options: TFLiteOptions, labels: Sequence[str]) -> Samples | None:
    """Images for calibration: those of a folder, or the training images in the run directory.

    None if the formats need none. Raises UserError where they do, and there are none or fewer than were asked for.
    """
    asked, is_needed = options.calibration_images, any(kind in CALIBRATED for kind in options.formats)
    number = _MOST_IMAGES if asked is None else asked
    stored = run.file(CALIBRATION)
    is_there = options.calibration is not None or stored is not None
    if not is_needed and not (is_there and any(kind in EIGHT_BIT_WEIGHTS for kind in options.formats)):
        return None
    if options.calibration is not None:
        found, where = read_folder(options.calibration, labels, most=number), options.calibration
    elif stored is not None:
        images = Samples.from_file(stored)
        found, where = Samples(images.encoded[:number], images.labels[:number]), f"{run.name}/{CALIBRATION}"
    elif run.directory is not None:
        raise UserError(
            f"{run.name} has no training images ({CALIBRATION}) to calibrate int4-weights and int8; pass "
            "--calibration FOLDER of representative images, or train again."
        )
    else:
        raise UserError("A checkpoint has no images to calibrate int4-weights and int8; pass --calibration FOLDER.")
    if asked is not None and len(found.encoded) < asked and is_needed:
        raise UserError(
            f"--calibration-images asks for {number} images, but {where} has {len(found.encoded)}; pass that number, "
            "or add images."
        )
    return found
