"""Texts as the classes of an ordinary model: their embeddings are the kernel of its head.

Paper: "Learning Transferable Visual Models From Natural Language Supervision" (CLIP, arXiv 2103.00020), section 3.1.
Agrees with `logits_per_image` of transformers' CLIPModel and SiglipModel, and averages templates as OpenAI's notebook
and open_clip's `build_zero_shot_classifier` do: normalized embeddings, their mean, normalized.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import LoadOptions, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.from_checkpoint import Original, weight_of
from keras_vit.checkpoints.infer_config import infer_blueprint
from keras_vit.checkpoints.key_mapping import Weight, join_keys
from keras_vit.cli.progress import Progress
from keras_vit.errors import UserError
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import dtype_policy
from keras_vit.models.config import Classes, ModelConfig, ViTConfig
from keras_vit.text.checkpoint import TextCheckpoint, open_text
from keras_vit.text.classes import text_classes
from keras_vit.text.tokenizer import Tokenizer, open_tokenizer

# Texts of one forward pass.
_BATCH = 256
# Positions of a shortened tower are a multiple of this.
_STEP = 8


def zero_shot(
    path: str | os.PathLike,
    classes: Sequence[str] | Mapping[str, str | Sequence[str]],
    templates: str | Sequence[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> keras.Model:
    """An ordinary model whose classes are texts, from a two-tower checkpoint of CLIP or SigLIP.

        model = keras_vit.zero_shot("hf:openai/clip-vit-base-patch32", ["a cat", "a dog"])

    The model is the image tower, its projection, a normalization, and a head whose kernel are the embeddings of the
    texts times exp(logit_scale); SigLIP's also has the bias logit_bias. So it saves, exports and trains as any other.

    Args:
        path: file, folder, address or name of the checkpoint, as `keras_vit.from_checkpoint` takes it, with its
            tokenizer.
        classes: one text for each class, which is its name, too; or a mapping from names to a text or several, whose
            embeddings are averaged.
        templates: a sentence or several in which a text replaces {}, such as "a photo of a {}.", whose embeddings are
            averaged; "clip" for the 80 that CLIP has for ImageNet, "siglip" for "This is a photo of {}.". None: the
            texts as they are.
        image_size: pixels, or (height, width). Default: that of the checkpoint.

    Returns:
        A functional keras.Model from images (B, height, width, 3) to logits (B, K). Their softmax are the probabilities
        of CLIP; of SigLIP it is their sigmoid, for each text by itself. `keras_vit.classes_of` tells the
        classes.

    Raises:
        UserError: if the checkpoint has no text tower or tokenizer, if a class is empty or there twice, or if a
            template has no {}.
    """
    checked = text_classes(classes, templates)
    text = open_text(path)
    embeddings = _class_embeddings(text, open_tokenizer(path, text), checked)
    return with_text_head(path, text, embeddings, checked, image_size)


def class_embeddings(path: str | os.PathLike, classes: Classes) -> np.ndarray:
    """The embedding of each class by the text tower of a checkpoint: (K, D) float32, of length 1."""
    text = open_text(path)
    return _class_embeddings(text, open_tokenizer(path, text), classes)


def with_text_head(
    path: str | os.PathLike,
    text: TextCheckpoint,
    embeddings: np.ndarray,
    classes: Classes,
    image_size: int | tuple[int, int] | None = None,
) -> keras.Model:
    """The image tower of a checkpoint with a head of text embeddings (K, D), each of length 1."""
    checkpoint, name = open_checkpoint(find_checkpoint(path)), os.fsdecode(path)
    options = LoadOptions(image_size=image_size, dtype="float32")
    tower = infer_blueprint(checkpoint, name, options)
    config, weights = _with_head(tower, checkpoint.weights, embeddings, text, name)
    classes = dataclasses.replace(classes, multi_label=text.bias is not None)
    blueprint = dataclasses.replace(tower, config=config, classes=classes)
    return Original(blueprint, dataclasses.replace(checkpoint, weights=weights)).build(options)


def _with_head(
    tower: Blueprint, weights: Mapping[str, Weight], embeddings: np.ndarray, text: TextCheckpoint, name: str
) -> tuple[ModelConfig, Mapping[str, Weight]]:
    """Config and weights of an image tower whose head are the embeddings of texts (K, D)."""
    config, own = tower.config, weights.keys() & {"head/bias", "pre_logits/kernel"}
    if tower.task is not None or own or not isinstance(config, ViTConfig):
        what = "boxes, for which keras_vit.with_classes takes texts" if tower.task is not None else "a ResNet"
        what = join_keys(sorted(own)) if own and tower.task is None else what
        raise UserError(f"The image tower of {name} has {what}, unlike CLIP and SigLIP; give one of those.")
    weights = dict(weights)
    projection = weights.pop("head/kernel", None)
    if projection is not None:  # CLIP's
        weights["pre_logits/kernel"] = projection
    # In float64, because the product with the scale is rounded once.
    kernel = (embeddings.astype(np.float64).T * text.scale).astype(np.float32)
    weights["head/kernel"] = weight_of("head/kernel", kernel)
    if text.bias is not None:
        weights["head/bias"] = weight_of("head/bias", np.full(len(embeddings), text.bias, np.float32))
    config = dataclasses.replace(
        config,
        representation_size=None if projection is None else projection.shape[1],
        representation="tanh" if projection is None else "projection",
        normalized=True,
        head_bias=text.bias is not None,
    )
    return config, weights


def _class_embeddings(text: TextCheckpoint, tokenize: Tokenizer, classes: Classes) -> np.ndarray:
    """The embedding of each class (K, D) float32, of length 1: the mean over its texts in all templates."""
    counts = [len(texts) * len(classes.templates) for texts in classes.texts]
    owners = np.repeat(np.arange(len(counts)), counts)
    sums = np.zeros((len(counts), text.config.output_size), np.float64)
    done, towers = 0, dict[int, keras.Model]()
    sentences = (
        template.replace("{}", text) for texts in classes.texts for text in texts for template in classes.templates
    )
    with Progress("Reading the texts", sum(counts), "texts") as progress:
        while batch := list(itertools.islice(sentences, _BATCH)):
            ids, lengths = tokenize.encode(batch)
            embeddings = _embed(text, towers, ids, int(lengths.max()))
            np.add.at(sums, owners[done : done + len(ids)], embeddings)
            done += len(ids)
            progress.update(len(ids))
    return (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)


def _embed(text: TextCheckpoint, towers: dict[int, keras.Model], ids: np.ndarray, used: int) -> np.ndarray:
    """The embeddings of token ids (N, T), of which `used` are no padding; `towers` keeps the models by their length."""
    full = text.config.length
    length = min(-(-used // _STEP) * _STEP, full) if text.config.causal else full
    if length not in towers:
        towers[length] = _tower_of_length(text, length)
    if len(ids) < _BATCH:  # not worth tracing a graph
        return keras.ops.convert_to_numpy(towers[length](ids[:, :length], training=False))
    return towers[length].predict_on_batch(ids[:, :length])


def _tower_of_length(text: TextCheckpoint, length: int) -> keras.Model:
    weights = dict(text.weights)
    table = weights["embedding/positions"]
    weights["embedding/positions"] = table.mapped((length, table.shape[1]), lambda array: array[:length])
    config = dataclasses.replace(text.config, length=length)
    with dtype_policy("float32"):  # whatever the image tower will be trained in
        return dataclasses.replace(text, config=config, weights=weights).build()
