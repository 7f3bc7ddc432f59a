"""Building a model, and asking it what it is."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import keras

from keras_vit.errors import UserError, check_choice, check_integers, check_known
from keras_vit.files.labels import check_number
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.attention import AttentionProbabilities
from keras_vit.models.config import (
    Classes,
    ModelConfig,
    ResNetConfig,
    TaskConfig,
    ViTConfig,
    check_blocks,
    config_from_dict,
    python_numbers,
    with_rates,
)
from keras_vit.models.image_model import ImageModel
from keras_vit.models.layers import ModelSpec, PoolTokens, TokenDense
from keras_vit.models.named_models import model_config
from keras_vit.models.resnet import big_transfer, resnet_classifier
from keras_vit.models.vit import vision_transformer

_ACTIVATIONS = ("softmax", "sigmoid")
# The layer of the classifier_activation.
_PROBABILITIES = "probabilities"


def build(
    model: str | ModelConfig,
    *,
    image_size: int | tuple[int, int] = 224,
    num_classes: int | None = 1000,
    channels: int = 3,
    preprocessing: Preprocessing | None = None,
    dropout_rate: float | None = None,
    attention_dropout_rate: float | None = None,
    stochastic_depth_rate: float | None = None,
    classifier_activation: str | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Build a model with the official initial weights.

    Args:
        model: a name from `keras_vit.MODELS`, or a configuration.
        image_size: side of the images in pixels, or (height, width). Must be a multiple of the patch size.
        num_classes: number of classes; with 0 or None the model outputs features (pre_logits) instead of logits.
        channels: channels of the images, 3 for RGB, 1 for grayscale.
        preprocessing: the preprocessing to save in the model. It overrides image_size and channels. Of images that are
            no multiple of the patch size, the rest is dropped. Defaults to a bilinear resize and the range [-1, 1], as
            in vit_jax.
        dropout_rate: of the residual branches and the embedding of a Vision Transformer, in [0, 1). Default: that of
            the configuration.
        attention_dropout_rate: of the attention probabilities, likewise.
        stochastic_depth_rate: of whole residual branches, likewise.
        classifier_activation: "softmax" or "sigmoid" for probabilities; None for logits.
        dtype: a Keras dtype policy, such as "mixed_bfloat16". Default: Keras' global policy.
        name: name of the keras.Model. Defaults to the name of the model, or "model" for a configuration.

    Returns:
        A functional keras.Model from images (B, height, width, channels), float in [-1, 1], to logits
        (B, num_classes).

        A loss given to `compile` by its name, such as "sparse_categorical_crossentropy", expects probabilities. For
        logits take `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, or build the model with
        classifier_activation="softmax".
    """
    rates = {"dropout_rate": dropout_rate, "attention_dropout_rate": attention_dropout_rate}
    config = with_rates(model_config(model), {**rates, "stochastic_depth_rate": stochastic_depth_rate})
    if preprocessing is None:
        preprocessing = Preprocessing(image_size, channels)  # type: ignore[arg-type]  # an int means a square
        if isinstance(config, ViTConfig):
            config.check_image_size(preprocessing.image_size)
    num_classes = python_numbers(num_classes)
    check_integers("num_classes", num_classes, least=0)
    name = name or (model.replace("+", "_") if isinstance(model, str) else "model")
    with dtype_policy(dtype):
        network = _network(config, preprocessing, num_classes, name)
        return _with_activation(network, classifier_activation, num_classes) if classifier_activation else network


def _with_activation(network: keras.Model, name: str, num_classes: int | None) -> keras.Model:
    check_choice("classifier_activation", name, _ACTIVATIONS)
    if not num_classes:
        raise UserError("classifier_activation is for a model with classes; give num_classes, or leave it out.")
    activation = keras.layers.Activation(name, dtype="float32", name=_PROBABILITIES)
    return ImageModel(network.input, activation(network.output), name=network.name)


@contextlib.contextmanager
def dtype_policy(name: str | None) -> Iterator[None]:
    """Build the layers inside the block with a dtype policy; None keeps the global one."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(before if name is None else keras.dtype_policies.get(name))
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of float32 in float32 inside the block.

    On a GPU, both backends else round their factors to the 10 bits of TensorFloat-32, as training does.
    """
    if keras.backend.backend() == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            yield
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)
    else:
        yield


def _network(config: ModelConfig, preprocessing: Preprocessing, num_classes: int | None, name: str) -> keras.Model:
    if isinstance(config, ResNetConfig):
        network = big_transfer if config.preactivation else resnet_classifier
        return network(config, preprocessing, num_classes, name)
    if config.classifier == "none" and num_classes:
        raise UserError(
            f"A model with classifier 'none' ends with its tokens and has no head for {num_classes} classes; "
            "give num_classes=0, or another classifier."
        )
    return vision_transformer(config, preprocessing, num_classes, name)


def classifier_activation_of(model: keras.Model) -> str | None:
    """The `classifier_activation` of a model that `keras_vit.build` created."""
    layer = _last_layer(model)
    return layer.activation.__name__ if layer is not None and layer.name == _PROBABILITIES else None


def is_multi_label(model: keras.Model) -> bool:
    """Whether an image may have several classes: as the `classifier_activation` says, else as the classes do."""
    activation, classes = classifier_activation_of(model), saved_classes(model)
    return activation == "sigmoid" if activation else classes is not None and classes.multi_label


def logits_model(model: keras.Model) -> keras.Model:
    """The model up to its logits; the model itself if it has no classifier_activation.

    Raises UserError for a model that ends with a softmax or sigmoid of another name.
    """
    last = _last_layer(model)
    if last is None:
        return model
    if last.name == _PROBABILITIES:
        return keras.Model(model.input, last.input, name=model.name)
    activation = getattr(getattr(last, "activation", None), "__name__", type(last).__name__).lower()
    if activation in _ACTIVATIONS:
        raise UserError(
            f"The model {model.name!r} ends with the {activation} {last.name!r}, but its logits are needed, of which "
            "probabilities are computed; give the model without it, or build it with "
            f"classifier_activation={activation!r}."
        )
    return model


def _last_layer(model: keras.Model) -> keras.Operation | None:
    """The layer, or function of keras.ops, whose output is that of the model; None for several outputs."""
    return None if len(model.outputs) != 1 else _maker(model, model.outputs[0])


def _maker(model: keras.Model, tensor: keras.KerasTensor) -> keras.Operation | None:
    return next((each for each in model.operations if each.output is tensor), None)


def classifier_head(model: keras.Model) -> keras.layers.Layer | None:
    """The dense layer that makes the logits (B, K), whatever its name; None for a model that ends with features.

    It is the last one, with nothing but layers of one input behind it, such as a scaling.
    """
    layer = _last_layer(model)
    while layer is not None and isinstance(layer.input, keras.KerasTensor) and layer.name != "pre_logits":
        if isinstance(layer, keras.layers.Dense) and len(layer.output.shape) == 2:
            return layer
        layer = None if isinstance(layer, keras.layers.InputLayer) else _maker(model, layer.input)
    # Of two heads, or with a layer that was called again, the walk ends before it.
    return next((layer for layer in model.layers if layer.name in ("head", "resnet.head.conv2d")), None)


def classifies(model: keras.Model) -> bool:
    """Whether the model outputs one vector of logits per image; the projection of CLIP, without a bias, gives none.

    A head of texts has no bias either, but reads normalized features.
    """
    head, config = classifier_head(model), config_of(model)
    of_texts = isinstance(config, ViTConfig) and config.normalized
    is_projection = isinstance(head, TokenDense) and not head.use_bias and not of_texts
    is_one_vector = len(model.outputs) == 1 and len(model.output_shape) == 2
    return is_one_vector and head is not None and not is_projection


def check_classifies(model: keras.Model, name: str) -> None:
    """Raise UserError, whose sentence begins with `name`, for a model with several outputs or without a head."""
    if len(model.outputs) != 1:
        raise UserError(
            f"{name} has {len(model.outputs)} outputs, but its logits alone are needed; give "
            "keras.Model(model.input, logits)."
        )
    if not classifies(model):
        raise UserError(
            f"{name} has no head: it ends with features of shape {model.output_shape}; add one by keras-vit finetune "
            "or keras_vit.adapt(model, num_classes=…), or probe the features by keras-vit fewshot."
        )


def config_of(model: keras.Model) -> ModelConfig:
    """Return the configuration of a model that `keras_vit.build` created, also after saving and loading."""
    return config_from_dict(model_spec(model).model)


def preprocessing_of(model: keras.Model) -> Preprocessing:
    """Return the preprocessing of a model. Call it on a decoded image."""
    return Preprocessing.saved(model_spec(model).preprocessing)


def task_of(model: keras.Model) -> TaskConfig | None:
    """The configuration of the further task of a model; None for a classifier, or features."""
    task = model_spec(model).task
    return None if task is None else config_from_dict(task)


def classes_of(model: keras.Model) -> tuple[str, ...] | None:
    """Return the names of a model's classes, in the order of its logits; None if the model does not know them.

    They are saved with the model: those of the checkpoint, of the training data, or of `set_classes`. A head of your
    own has none until `set_classes` names them.
    """
    classes = saved_classes(model)
    return None if classes is None else classes.labels


def saved_classes(model: keras.Model) -> Classes | None:
    """Return all that a model saves of its classes: names, and the texts of `keras_vit.zero_shot`; None if nothing.

    Those of a head that was replaced, or changed in its number of classes, are not returned.
    """
    spec = next((layer for layer in model.layers if isinstance(layer, ModelSpec)), None)
    if spec is None or not spec.classes:
        return None
    head, numbers = _head_name(model), numbers_of_classes(model)
    known = (Classes(**each) for each in _classes_of_heads(spec) if each.get("head") in (None, head))
    return next((classes for classes in known if len(classes.labels) in numbers), None)


def _classes_of_heads(spec: ModelSpec) -> list[dict]:
    """The classes of each head; models with heads of their own may share the other layers, and so the spec."""
    return spec.classes if isinstance(spec.classes, list) else [spec.classes] if spec.classes else []


def set_classes(model: keras.Model, classes: Classes | Sequence[str] | None) -> None:
    """Save the names of the classes in a model, in the order of its logits; `model.save` then keeps them.

    Args:
        model: built by `keras_vit.build`, or with a head of your own on such a model.
        classes: a name for each logit; None removes them.

    Raises UserError for another number of names than the model has classes.
    """
    if classes is not None:
        classes = classes if isinstance(classes, Classes) else Classes(tuple(classes))
        numbers = numbers_of_classes(model)
        if len(classes.labels) not in numbers:
            check_number(classes.labels, "The argument classes", numbers[0] if numbers else 0, model.name)
        classes = dataclasses.replace(classes, head=_head_name(model))
    spec = model_spec(model)
    known = [] if classes is None else [dataclasses.asdict(classes)]
    known += [each for each in _classes_of_heads(spec) if each.get("head") not in (None, _head_name(model))]
    spec.classes = known[0] if len(known) == 1 else known or None


def numbers_of_classes(model: keras.Model) -> tuple[int, ...]:
    """Return the number of classes of a model, and where one logit is that of no class also the number without it."""
    if isinstance(model.output, dict):
        logits = model.output.get("class_logits")
        return () if logits is None else (logits.shape[-1], logits.shape[-1] - 1)
    return (model.output_shape[-1],) if len(model.outputs) == 1 and classifier_head(model) is not None else ()


def _head_name(model: keras.Model) -> str | None:
    head = classifier_head(model)
    return None if head is None else head.name


def model_spec(model: keras.Model) -> ModelSpec:
    for layer in model.layers:
        if isinstance(layer, ModelSpec):
            return layer
    what = "was not built by keras_vit; take one of keras_vit.build, keras_vit.from_checkpoint or a training run"
    for inner in model.layers:
        if isinstance(inner, keras.Model) and any(isinstance(layer, ModelSpec) for layer in inner.layers):
            what = (
                f"contains a model of keras_vit, but is none itself; give that one, model.get_layer({inner.name!r}), "
                "or connect your own layers to it as inner in keras.Model(inner.input, layer(inner.output))"
            )
    raise UserError(f"The model {model.name!r} {what}.")


def has_own_call(model: keras.Model) -> bool:
    """Whether a model has a `call` of the user's, which may compute something else than its graph of layers."""
    # Keras gives a functional class its `call` with the first model of it, so those of two classes cannot be compared.
    of_keras = type(model).call.__module__.partition(".")[0] == "keras"
    return not hasattr(model, "operations") or not of_keras or "call" in vars(model)


def class_token_only(model: keras.Model) -> frozenset[str]:
    """Names of the layers whose outputs (B, N, D) are read at the class token alone.

    Behind the class token there is a head that reads one token of N. In the last block keys and values are then needed
    of all tokens, but the query, the mean of the values, the MLP and the norms only of the first one: 7% of the
    products of a ViT-B/16 are for the others. The outputs, and the gradients of all weights, are the same to float
    rounding without them. A model as it is built computes all tokens all the same, for whoever looks into it.

    Empty for other models, and for models that do not end with their own head.
    """
    layers = {layer.name: layer for layer in model.layers}
    pool, ends = layers.get("pool"), ("pool", "pre_logits", "normalized", "head")
    if not isinstance(pool, PoolTokens) or pool.kind != "token":
        return frozenset()
    config = config_of(model)
    if not isinstance(config, ViTConfig) or config.classifier != "token":
        return frozenset()
    if len(model.outputs) != 1 or not any(model.outputs[0] is layers[end].output for end in ends if end in layers):
        return frozenset()
    inside = layers.keys() & _behind_attention(config, layers)
    try:
        calls = {layer["name"]: layer["inbound_nodes"] for layer in model.get_config()["layers"]}
    except NotImplementedError:  # a layer of the user's without get_config
        return frozenset()
    for name, arguments in calls.items():  # a layer of the user's, or a block that is called again, may read all tokens
        if name not in (*inside, "pool") and not inside.isdisjoint(_layers_read(arguments)):
            return frozenset()
    return frozenset(inside)


def _behind_attention(config: ViTConfig, layers: Collection[str]) -> set[str]:
    """Names of the layers of the last block, and of the norm behind it, that need no other token than the one read.

    A user may have left some of them out.
    """
    block = f"Transformer.encoderblock_{config.num_layers - 1}"
    attention = f"{block}.MultiHeadDotProductAttention_1"
    of_all = {f"{block}.posembed_input", f"{block}.LayerNorm_0", *(f"{attention}.{part}" for part in ("key", "value"))}
    # Their attention bias comes with the query of all tokens.
    if config.position_embedding == "relative" or config.locality_attention:
        of_all |= {attention, *(f"{attention}.{part}" for part in ("query", "scaled_query", "relative"))}
    if config.is_rotary:
        of_all |= {f"{attention}.{part}" for part in ("query", "rotated_query", "rotated_key")}
    last = {name for name in layers if name.startswith(f"{block}.")} | {block, "Transformer.encoder_norm"}
    return last - of_all


def _layers_read(arguments: object) -> Iterator[str]:
    """Names of the layers whose outputs are among the arguments of calls, as the config of a model has them."""
    if isinstance(arguments, dict) and "keras_history" in arguments:
        yield arguments["keras_history"][0]
    elif isinstance(arguments, dict | list | tuple):
        for argument in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _layers_read(argument)


def calling_class_token_only(names: Collection[str]) -> Callable:
    """The `call_function` with which keras.models.clone_model computes the named layers for the class token alone."""

    def first(tokens):
        return tokens if tokens.shape[-2] == 1 else tokens[..., :1, :]  # (B, 1, D)

    def call(layer, tokens, *others, **options):
        if layer.name in names:  # others are the keys and values of attention
            tokens = keras.tree.map_structure(first, tokens)
        return layer(tokens, *others, **options)

    return call


def intermediates(model: keras.Model, names: str | Collection[str] | None = None) -> keras.Model:
    """A model with the same input and weights whose output is a dict of what happens inside.

    Names, in the order of the computation, and their shapes:
        "patch_embedding" (B, h, w, D); "embedded" (B, N, D), with class token and positions;
        "block_0" ... (B, N, D); "attention_0" ... (B, H, N, N), softmax probabilities of inference;
        "encoded" (B, N, D), after the last LayerNorm; "pre_logits" (B, D), what the head reads (unpooled: (B, N, D));
        "logits"; with two heads, also "cls_logits" and "distillation_logits", whose mean they are.
        Axial models have "attention_0_row" (B * h, H, w, w) and "attention_0_column" (B * w, H, h, h) ... instead.
        Hybrids begin with "resnet_root" and "resnet_block1" ..., feature maps (B, h, w, C).
        BiT has "root", "stage1" ... (B, h, w, C), "pre_logits" (B, C), "logits".

    Args:
        model: built by `keras_vit.build`, also after saving and loading.
        names: names of the outputs; None for all that the model has. With one name instead of a list, the output is
            that tensor instead of a dict.
    """
    available = _available(model)
    if isinstance(names, str):
        return keras.Model(model.input, intermediates(model, [names]).output[names], name=f"{model.name}_{names}")
    for name in names or ():
        check_known("intermediate", name, available)
    outputs = {name: available[name]() for name in (available if names is None else names)}
    network = keras.Model(model.input, outputs, name=f"{model.name}_intermediates")
    # A layer's `output` is that of its first call, which may belong to another model with the same layers.
    own = {id(layer) for layer in model.layers}
    if any(layer.weights and id(layer) not in own for layer in network.layers):
        raise UserError(
            f"The model {model.name!r} calls layers that another model called before, so that these intermediates "
            "would be those of the other one; save it, load the file, and take the intermediates of that model."
        )
    return network


def get_layer(model: keras.Model, name: str) -> keras.layers.Layer:
    """Return a layer of a model by a name of `intermediates`, such as "block_0" or "encoded", or by its own name.

    The layer is the one whose output the intermediate is; "attention_0" is the layer that multiplies the values by the
    probabilities. The names of the layers are the paths of the official checkpoints, with dots for slashes.

    Raises UserError for a name that is neither.
    """
    layers = {layer.name: layer for layer in model.layers}
    if name in layers:
        return layers[name]
    available = _available(model)
    check_known("layer", name, available, layers)
    if match := re.fullmatch(r"attention_(\d+)(?:_(row|column))?", name):
        axis = f".{match[2]}" if match[2] else ""
        return layers[f"Transformer.encoderblock_{match[1]}{axis}.MultiHeadDotProductAttention_1"]
    layer = _maker(model, available[name]())
    if layer is None:
        raise UserError(f"No layer outputs {name!r} alone; take keras_vit.intermediates(model, {name!r}).")
    return layer


def _available(model: keras.Model) -> dict[str, Callable]:
    """Return a function that gives the tensor for each name of `intermediates`; a user may have cut the model."""
    config, layers = config_of(model), {layer.name: layer for layer in model.layers}
    if isinstance(config, ViTConfig):
        available = _inside_vit(config, layers)
    else:
        available = _inside_resnet(config, layers) | _outputs(layers, {"pre_logits": ["pool"]})
    if head := classifier_head(model):
        available["logits"] = lambda: logits_model(model).output if len(model.outputs) == 1 else head.output
        if "mean_of_heads" not in layers:
            available["pre_logits"] = lambda: head.input
    return available


def feature_map(model: keras.Model, name: str) -> keras.Model:
    """A model from images to the features of one place inside, on their grid: (B, h, w, D).

    Args:
        model: built by `keras_vit.build`.
        name: of an intermediate: tokens, of which those of the patches are put on the grid, or a feature map.
    """
    features, config = intermediates(model, [name]).output[name], config_of(model)
    if len(features.shape) == 3 and isinstance(config, ViTConfig):
        rows, columns = config.grid(preprocessing_of(model).image_size)
        patches = features[:, config.num_prefix_tokens :] if config.num_prefix_tokens else features
        features = keras.layers.Reshape((rows, columns, features.shape[-1]), dtype="float32")(patches)  # (B, h, w, D)
    if len(features.shape) != 4 or name.startswith("attention_"):
        raise UserError(f"The intermediate {name!r} has no place in the image for each of its vectors; take a block's.")
    return keras.Model(model.input, features, name=f"{model.name}_{name}")


def feature_maps(model: keras.Model, blocks: Collection[int], *, norm: bool = True) -> keras.Model:
    """A model from images to the patch tokens of some blocks on their grid, for dense prediction.

    As DINOv2's `get_intermediate_layers(reshape=True)`, but with the channels last.

    Args:
        model: built by `keras_vit.build`, a Vision Transformer.
        blocks: their numbers, from 0; negative ones count from the last block, which is -1.
        norm: whether to apply the LayerNorm behind the last block, where the model has one, to each of them.

    Returns:
        A model whose output is a dict: "block_0" ... for each of the blocks, (B, h, w, D).
    """
    config = config_of(model)
    if not isinstance(config, ViTConfig):
        raise UserError("A ResNet has no blocks of tokens; use feature_map with the name of a stage.")
    count = config.num_layers
    check_blocks(blocks, count)
    tokens = intermediates(model, [f"block_{block % count}" for block in blocks]).output
    has_norm = config.final_norm and not config.norm_after_pooling
    last_norm = model.get_layer("Transformer.encoder_norm") if norm and has_norm else None
    sides = config.grid(preprocessing_of(model).image_size)
    grid = keras.layers.Reshape((*sides, config.hidden_size), dtype="float32")
    maps = {}
    for name, x in tokens.items():
        x = last_norm(x) if last_norm is not None else x
        maps[name] = grid(x[:, config.num_prefix_tokens :])  # (B, h, w, D)
    return keras.Model(model.input, maps, name=f"{model.name}_feature_maps")


def _inside_resnet(config: ResNetConfig, layers: dict) -> dict:
    """Name of a feature map -> function that gives the tensor."""
    stages = list(enumerate(config.block_units, 1))
    if config.preactivation:
        names = {"root": "resnet.root_block"}
        names |= {f"stage{stage}": f"resnet.block{stage}.unit{units:02d}" for stage, units in stages}
    else:
        names = {"resnet_root": "resnet_root"}
        names |= {f"resnet_block{stage}": f"block{stage}.unit{units}" for stage, units in stages}
    return _outputs(layers, {name: [layer] for name, layer in names.items()})


def _outputs(layers: dict, candidates: Mapping[str, Sequence[str]]) -> dict[str, Callable]:
    """Name -> function that gives the output of the first of its layers that the model has, if it has one."""
    found = {name: next((layer for layer in names if layer in layers), None) for name, names in candidates.items()}
    return {name: lambda layer=layer: layers[layer].output for name, layer in found.items() if layer is not None}


def _inside_vit(config: ViTConfig, layers: dict) -> dict:
    """Name -> function that gives the tensor; attention probabilities are computed only where they are asked for."""

    def attention(block: str):
        projections = f"{block}.MultiHeadDotProductAttention_1"
        rotated = "rotated_" if config.is_rotary else ""
        scaled_or_rotated = "scaled_" if config.locality_attention else rotated
        parts = [f"{projections}.{part}" for part in (f"{scaled_or_rotated}query", f"{rotated}key", "relative")]
        scaled = layers[projections].scaled
        # Whatever dtype policy is global now, what is inside of the model stays.
        layer = AttentionProbabilities(
            config.num_heads, scaled, dtype="float32", name=f"{block}.attention_probabilities"
        )
        return layer(*(layers[part].output for part in parts if part in layers))

    available = _inside_resnet(config.stem, layers) if isinstance(config.stem, ResNetConfig) else {}
    axes = {"_row": ".row", "_column": ".column"} if config.axial else {"": ""}
    first_norm = f"Transformer.encoderblock_0{next(iter(axes.values()))}.LayerNorm_0"
    available |= _outputs(layers, {"patch_embedding": ["embedding"]})
    if first_norm in layers:
        available["embedded"] = lambda: layers[first_norm].input
    last: list[str] = []
    for layer in range(config.num_layers):
        block = f"Transformer.encoderblock_{layer}"
        last = [f"{block}.column", block]
        available |= _outputs(layers, {f"block_{layer}": last})
        for suffix, axis in axes.items():
            if f"{block}{axis}.MultiHeadDotProductAttention_1" in layers:
                available[f"attention_{layer}{suffix}"] = lambda name=f"{block}{axis}": attention(name)
    encoded = ["Transformer.encoder_norm"] if config.final_norm else last
    if not config.norm_after_pooling:
        available |= _outputs(layers, {"encoded": encoded})
    if config.classifier != "none":
        pooled = encoded if config.norm_after_pooling or config.classifier == "unpooled" else ["pool"]
        available |= _outputs(layers, {"pre_logits": ["normalized", "pre_logits", *pooled]})
    if config.distillation == "head" and "pool_distillation" in layers:
        pools = [layers[name].output for name in ("pool", "pool_distillation")]
        available["pre_logits"] = lambda: keras.layers.Average(dtype="float32")(pools)
        available |= _outputs(layers, {"cls_logits": ["head"], "distillation_logits": ["head_distillation"]})
    return available
