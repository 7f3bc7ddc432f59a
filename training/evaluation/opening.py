"""Open what the options of `keras-vit evaluate` name. Imports no TensorFlow."""

from keras_vit import UserError
from keras_vit.checkpoints.find import check_name
from keras_vit.cli.parser import Given
from keras_vit.run import CONFIG, Run
from keras_vit.text.classes import classes_of_options
from training.options.evaluate import EvaluateOptions


def with_data(given: Given) -> Given:
    """Return the options that were given; without --data, also the data options of the run, which are printed.

    Raises UserError where the run does not know its data, or where these are gone.
    """
    name = given.get(("run",))
    if name is None or ("source", "data") in given:
        return given
    run = Run.open(name)
    known = run.settings.get("source") if run.file(CONFIG) else None
    if not isinstance(known, dict) or "data" not in known:
        check_name(name)
        raise UserError(f"{name} does not say what it was trained on; give --data, such as --data folder:pictures.")
    print(f"Data: {known['data']}, on which {name} was trained; evaluated on its evaluation images.")
    return {**{("source", field): value for field, value in known.items()}, **given}


def open_run(options: EvaluateOptions) -> Run:
    """Open the model to measure. Raises UserError for what is no model, and where it cannot be calibrated."""
    texts = classes_of_options(options.classes, options.templates) if options.classes else None
    size, heads = options.input.image_size, options.input.num_heads
    run = Run.open(options.run, image_size=size, num_heads=heads, texts=texts)
    if options.calibrate:
        if not run.file(CONFIG):
            raise UserError(f"--calibrate is for a run directory, but {run.name} is none; leave it out.")
        changed = ("image_size", "resize", "crop_from", "value_range")
        options.input.refuse(changed, "--calibrate, which is for the run as it is used")
    return run


def next_commands(options: EvaluateOptions, run: Run) -> list[tuple[str, ...]]:
    """Return commands to go on with after the evaluation of a run or checkpoint."""
    if run.file(CONFIG) and options.classes is None:
        return run.next_commands("evaluate")
    head = () if options.classes is None else ("--zero-shot-head",)
    return [
        ("finetune", "--checkpoint", options.run, *head, *options.source.arguments(), "--workdir", "runs/finetuned")
    ]
