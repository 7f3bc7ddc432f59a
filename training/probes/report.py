"""What the probes of frozen features leave behind: a page, the numbers, and a table on the terminal."""

import json
from collections.abc import Sequence

from keras_vit.files.atomic import staged
from keras_vit.files.tables import markdown_table, short_name
from training.options.common import FeatureOptions
from training.probes.features import FeatureSet


def write_report(
    name: str,
    title: str,
    options: FeatureOptions,
    features: FeatureSet,
    header: Sequence[str],
    table: Sequence[Sequence[str]],
    numbers: dict,
) -> None:
    """Write NAME.json and NAME.md and print the table.

    Args:
        title: of the page.
        header, table: texts, the first column on the left, numbers on the right.
        numbers: for the JSON, beside what was measured on what.
    """
    model = f"{options.run} with random weights" if options.random_weights else options.run
    train, evaluation = features.train, features.evaluation
    document = {
        "model": model,
        "data": options.source.data,
        "classes": len(features.names),
        "features": train.values.shape[1],
        "kind": options.features,
        "training_images": len(train.labels),
        "evaluation_images": len(evaluation.labels),
        "crop_from": options.crop_from,
        **numbers,
    }
    sentence = (
        f"{train.values.shape[1]} features of {len(train.labels):,} training and {len(evaluation.labels):,} evaluation "
        f"images of {len(features.names)} classes."
    )
    text = markdown_table(header, table)
    of_random = " with random weights" if options.random_weights else ""
    where = f"{short_name(options.run)}{of_random} on {short_name(options.source.data)}"
    page = [f"# {title}: {where}", "", sentence, "", text, ""]
    with staged(features.output) as stage:
        (stage / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        (stage / f"{name}.md").write_text("\n".join(page), encoding="utf-8")
    print(text)
    print(f"{sentence[:-1]}; report in {features.output / f'{name}.md'}.")
