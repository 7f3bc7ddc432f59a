"""What each figure shows, in a sentence for somebody who has not read the paper, and when it means nothing."""

import math

from keras_vit.inspection.compute import InspectionResult

# Up to so many patches, a map has too few values.
_FEW_PATCHES = 16
_OF_PATCHES = ("positions", "distance", "rollout", "relevance", "norms", "attention")

_SENTENCES = {
    "components": "What the first layer tells apart in a patch: the patterns that explain most of its weights. A "
    "trained model has stripes, spots and colors; noise means that it learned little.",
    "filters": "What the first layer looks for. A trained model has edges and colors; noise means that it learned "
    "little.",
    "positions": "Each tile belongs to one patch and shows which positions are similar to its own for the model: in a "
    "trained model those nearby. Tiles that all look alike mean that the model learned no positions.",
    "distance": "How far each head looks, in pixels: low dots look at neighbors, high dots across the picture. Dots at "
    "one height mean that the heads look everywhere, as in an untrained model.",
    "renormalized": "The same among the patches alone: what a head gives to the class token does not count.",
    "rollout": "Attention rollout: how much each part of the picture reaches the result through all layers. It is the "
    "same for every class, and an even map means nothing.",
    "relevance": "Relevance (Grad-CAM): the parts that speak for the predicted class. Where the map is dark, nothing "
    "speaks for it; a map that is dark everywhere means nothing.",
    "norms": "Token norms: how strong the signal of each part is in the last layer. Single bright patches on the "
    "background are not objects: large models keep other information there.",
    "queries": "Queries: the parts that a query took for one thing, its class, and how sure it is. The four surest "
    "queries are shown; those of a class with a low probability found nothing.",
    "attention": "Where each head of each layer looks, from the output (the class token, or the mean of all tokens). "
    "Each map is scaled separately, so a nearly even map may look lively.",
}


def explanation(figure: str, result: InspectionResult) -> str:
    """The sentences under a figure: a name of `FIGURES`, components or renormalized."""
    sentence = _SENTENCES[figure]
    if figure in _OF_PATCHES and result.grid is not None and math.prod(result.grid) <= _FEW_PATCHES:
        rows, columns = result.grid
        sentence += f" This model has only {rows} x {columns} patches: too few values to mean much."
    return sentence
