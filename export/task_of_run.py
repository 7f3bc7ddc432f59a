"""The task of the model to export."""

from export.detection import open_detection
from export.embeddings import open_embedding
from export.options import Embeddings, SourceOptions
from export.segmentation import open_segmentation
from export.tasks import Task
from keras_vit.runs import Run


def task_of_run(run: Run, options: SourceOptions, embeddings: Embeddings | None) -> Task | None:
    """The embeddings of a model where they are asked for, or what a detector or segmenter does; None: it classifies."""
    if embeddings is not None:
        return open_embedding(run, options, embeddings)
    return open_detection(run, options) or open_segmentation(run, options)
