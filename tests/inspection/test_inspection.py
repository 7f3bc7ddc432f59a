"""What the figures show: the definitions, against golden data, analytic values and independent computations."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError, inspection
from keras_vit.inspection.plots import image_maps
from keras_vit.inspection.report import html_report
from tests.support import FIXTURES, GOLDEN, TINY, TINY_IMAGE, TINY_STEM, others_slow, randomize

ANALYSES = ["attention_vit_token", "attention_vit_nonsquare"]
# Attention exactly uniform over the patches: grid, patch, mean distance in pixels.
UNIFORM = [(14, 16, 116.4922), (7, 32, 115.5029), (16, 14, 116.5651), (24, 16, 200.048), (12, 32, 199.5058)]


def analysed(name: str) -> tuple[dict, dict, dict, keras.Model]:
    """Index entry, recorded results, recorded intermediates, and the model of the checkpoint."""
    entry = GOLDEN[name]
    of = GOLDEN[entry["of_fixture"]]
    model = keras_vit.from_checkpoint(FIXTURES / of["checkpoint"], image_size=tuple(of["image_size"]))
    return entry, dict(np.load(FIXTURES / entry["io"])), dict(np.load(FIXTURES / of["io"])), model


@pytest.mark.parametrize("name", ANALYSES)
def test_rollout_and_distances_agree_from_the_checkpoint_on(name):
    entry, expected, recorded, model = analysed(name)
    grid, patch = tuple(entry["grid"]), (entry["patch"],) * 2
    np.testing.assert_allclose(inspection.patch_distances(grid, patch), expected["distance_matrix"], rtol=1e-14)
    names = [f"attention_{layer}" for layer in range(3)]
    inside = keras_vit.intermediates(model, names)(recorded["images"])
    attentions = [inside[name].numpy() for name in names]
    # The index' own tolerance is for the recorded probabilities; these come anew out of a float32 forward pass.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    rollout = inspection.attention_rollout(attentions)[-1]
    close(rollout, expected["rollout"])
    close(inspection.attention_to_patches(rollout, grid, 1), expected["rollout_cls_to_patches"])
    for key, renormalize in (("mean_distance_raw", False), ("mean_distance_renormalised", True)):
        found = [inspection.mean_attention_distance(a, grid, patch, 1, renormalize=renormalize) for a in attentions]
        close(np.stack(found), expected[key])


def test_distances_of_oblong_patches_count_the_height_by_row_and_the_width_by_column():
    np.testing.assert_allclose(inspection.patch_distances((2, 2), (3.0, 4.0))[0], [0.0, 4.0, 3.0, 5.0])


@pytest.mark.parametrize(("side", "patch", "expected"), UNIFORM)
def test_uniform_attention_has_its_analytic_distance(side, patch, expected):
    patches, grid = side * side, (side, side)
    uniform = np.full((1, patches, patches), 1 / patches)
    distance = inspection.mean_attention_distance(uniform, grid, (patch, patch), 0)
    assert distance == pytest.approx(expected, abs=5e-5)
    assert inspection.patch_distances(grid, (patch, patch)).max() == pytest.approx(patch * (side - 1) * 2**0.5)

    with_token = np.full((1, patches + 1, patches + 1), 1 / (patches + 1))
    distance = inspection.mean_attention_distance(with_token, grid, (patch, patch), 1)
    assert distance == pytest.approx(expected * patches / (patches + 1), abs=5e-5)
    distance = inspection.mean_attention_distance(with_token, grid, (patch, patch), 1, renormalize=True)
    assert distance == pytest.approx(expected, abs=5e-5)


def test_without_a_class_token_the_mean_of_all_rows_stands_for_it():
    matrix = np.random.default_rng(2).dirichlet(np.ones(15), (2, 15))
    found = inspection.attention_to_patches(matrix, (3, 5), 0)
    np.testing.assert_allclose(found, matrix.mean(axis=1).reshape(2, 3, 5))


def test_registers_are_no_class_token():
    config = keras_vit.ViTConfig(
        patch_size=8, hidden_size=16, num_layers=1, num_heads=2, mlp_dim=32, classifier="gap", num_registers=2
    )
    model = randomize(keras_vit.build(config, image_size=32, num_classes=3))
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    image = inspection.Image("a", pixels)
    found = inspection.inspect(model, [image], checkpoint="x", figures=["attention"]).arrays["attention"][0, 0]
    inputs = np.asarray(keras_vit.preprocessing_of(model)(pixels))[None]
    attention = np.asarray(keras_vit.intermediates(model, "attention_0")(inputs))[0]
    np.testing.assert_allclose(found, attention.mean(axis=1)[:, 2:].reshape(2, 4, 4), rtol=1e-5)


def kernel_of(name: str, layer: str) -> np.ndarray:
    return keras_vit.from_checkpoint(FIXTURES / name).get_layer(layer).kernel.numpy()


def test_filters_are_the_eigenvectors_of_the_covariance_by_falling_eigenvalue():
    kernel = kernel_of("vit_token.npz", "embedding")  # (8, 8, 3, 48)
    found = inspection.principal_filters(kernel)
    assert found.shape == (28, 8, 8, 3)
    values, vectors = np.linalg.eigh(np.cov(kernel.astype(np.float64).reshape(-1, 48)))
    for component, vector in zip(found, vectors[:, ::-1].T[:28], strict=True):
        vector = vector * np.sign(vector[np.abs(vector).argmax()])
        np.testing.assert_allclose(component.ravel(), vector, atol=1e-9)
    assert values[-1] > values[-2]


def test_the_sign_and_the_number_of_filters_are_determined():
    kernel = np.random.default_rng(3).normal(size=(4, 6, 3, 10))
    found = inspection.principal_filters(kernel)
    assert found.shape == (10, 4, 6, 3)  # no more than there are filters
    np.testing.assert_allclose(inspection.principal_filters(-kernel)[:9], found[:9], atol=1e-12)
    flat = found.reshape(10, -1)
    assert np.all(np.take_along_axis(flat, np.abs(flat).argmax(axis=1)[:, None], axis=1) > 0)
    np.testing.assert_allclose(flat @ flat.T, np.eye(10), atol=1e-12)


def test_similarity_of_positions_is_the_cosine_of_each_two_patches():
    table = np.load(FIXTURES / "vit_token.npz")["Transformer/posembed_input/pos_embedding"]  # (1, 17, 48)
    found = inspection.position_similarity(table, 1)
    rows = table[0, 1:].astype(np.float64)
    for one in range(16):
        for other in range(16):
            cosine = np.dot(rows[one], rows[other]) / np.sqrt(np.dot(rows[one], rows[one]) * np.dot(*[rows[other]] * 2))
            assert found[one, other] == pytest.approx(cosine, abs=1e-12)
    assert np.array_equal(found.argmax(axis=1), np.arange(16))


def test_a_map_is_resized_as_opencv_does_and_its_maximum_is_one():
    found = inspection.resize_map(np.array([[0.0, 2.0], [4.0, 8.0]]), (2, 4))
    np.testing.assert_allclose(found, [[0, 0.0625, 0.1875, 0.25], [0.5, 0.625, 0.875, 1.0]])
    assert np.array_equal(inspection.resize_map(np.zeros((2, 2)), (4, 4)), np.zeros((4, 4)))


def test_axial_attention_unfolds_to_attention_between_all_patches():
    rng = np.random.default_rng(4)
    rows, columns = rng.dirichlet(np.ones(5), (2 * 3, 4, 5)), rng.dirichlet(np.ones(3), (2 * 5, 4, 3))
    by_row, by_column = (
        inspection.unfold_axial(folded, (3, 5), axis) for folded, axis in ((rows, "row"), (columns, "column"))
    )
    for query in range(15):
        for key in range(15):
            (r, c), (s, d) = divmod(query, 5), divmod(key, 5)
            same_row = rows.reshape(2, 3, 4, 5, 5)[:, r, :, c, d] if r == s else np.zeros((2, 4))
            same_column = columns.reshape(2, 5, 4, 3, 3)[:, c, :, r, s] if c == d else np.zeros((2, 4))
            assert np.array_equal(by_row[:, :, query, key], same_row)
            assert np.array_equal(by_column[:, :, query, key], same_column)


def test_relevance_of_bit_is_its_class_activation_map():
    model = randomize(keras_vit.build(keras_vit.ResNetConfig((1, 1), 8, num_groups=2), image_size=32, num_classes=5))
    images = np.random.default_rng(5).uniform(-1, 1, (3, 32, 32, 3)).astype(np.float32)
    classes = np.array([4, 0, 2])
    features, gradients, _ = inspection.features_and_gradients(model, images, classes)
    weights = model.get_layer("resnet.head.conv2d").kernel.numpy()[:, classes].T  # (3, C)
    expected = np.maximum(np.einsum("bhwc,bc->bhw", features, weights) / (features.shape[1] * features.shape[2]), 0.0)
    found = inspection.class_relevance(features, gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * expected.max())
    assert expected.max() > 0


@pytest.mark.parametrize("classifier", others_slow(["token", "gap", "map"], "token", "map"))
def test_gradients_of_a_vit_are_those_of_automatic_differentiation(classifier, tiny_images):
    config = dataclasses.replace(TINY, classifier=classifier)
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7))
    before = model.get_weights()
    found, gradients, logits = inspection.features_and_gradients(model, tiny_images)
    np.testing.assert_allclose(logits, model(tiny_images), rtol=1e-5, atol=1e-5)
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))
    assert all(weight.trainable for weight in model.trainable_weights)

    norm = model.get_layer("Transformer.encoderblock_1.LayerNorm_0")
    tail = keras.Model([norm.input, norm.output], model.output)
    stream, normed = keras.Model(model.input, [norm.input, norm.output])(tiny_images)
    with tf.GradientTape() as tape:
        tape.watch(normed)
        chosen = tf.reduce_sum(tf.reduce_max(tail([stream, normed]), axis=-1))
    expected = tape.gradient(chosen, normed).numpy()
    np.testing.assert_allclose(found, normed, rtol=1e-6)
    np.testing.assert_allclose(gradients, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("axial", others_slow([False, True], False))
def test_relevance_of_a_model_with_dropout_repeats_and_is_that_of_the_same_weights_without(axial, tiny_images):
    plain = dataclasses.replace(TINY, axial=axial, classifier="gap" if axial else "token")
    dropping = dataclasses.replace(plain, dropout_rate=0.1, attention_dropout_rate=0.1, stochastic_depth_rate=0.3)
    models = [randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7)) for config in (dropping, plain)]
    of_dropping, again, of_plain = (
        inspection.features_and_gradients(model, tiny_images) for model in (models[0], models[0], models[1])
    )
    for first, second, expected in zip(of_dropping, again, of_plain, strict=True):
        assert np.array_equal(first, second)
        assert np.array_equal(first, expected)
    assert np.any(of_plain[1])


def test_relevance_of_early_convolutions_takes_the_stored_statistics_and_leaves_them(tiny_images):
    config = dataclasses.replace(TINY, patch_size=1, stem=keras_vit.ConvStem((4, 8), (3, 3), (2, 2)))
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7))
    before = model.get_weights()
    together = inspection.features_and_gradients(model, tiny_images)
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))
    alone = inspection.features_and_gradients(model, tiny_images[:1])
    for of_all, of_one in zip(together, alone, strict=True):
        np.testing.assert_allclose(of_all[:1], of_one, rtol=1e-4, atol=1e-5 * np.abs(of_one).max())


def test_the_neighbourhood_is_measured_on_sides_and_beyond_half_the_largest_distance():
    centres = np.indices((1, 5)).reshape(2, -1).T[:, 1]
    similarity = 1.0 - np.abs(centres[:, None] - centres) / 4.0
    found = inspection.neighbourhood(similarity, (1, 5))
    assert found == {"own": 1.0, "adjacent": 0.75, "distant": pytest.approx((2 * 0.25 + 0.0) / 3)}
    assert inspection.neighbourhood(np.roll(similarity, 1, axis=0), (1, 5))["own"] == 0.0


def test_weight_per_pixel_is_one_for_even_attention_and_all_of_it_for_the_right_patch():
    foreground = np.zeros((2, 4, 6), bool)
    foreground[:, :2, :2] = True
    assert inspection.weight_per_pixel(np.ones((2, 2, 3)), foreground) == (1.0, 1.0)
    maps = np.zeros((2, 2, 3))
    maps[:, 0, 0] = 0.25
    assert inspection.weight_per_pixel(maps, foreground) == (6.0, 0.0)


def photo(height: int, width: int, name: str = "p.png", seed: int = 0) -> inspection.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return inspection.Image(name, pixels)


OF_ATTENTION = {"filters", "distance", "rollout", "attention", "norms"}
ALL = OF_ATTENTION | {"positions", "relevance"}
MODELS = {
    "token": (TINY, ALL),
    "gap": (dataclasses.replace(TINY, classifier="gap"), ALL),
    "unpooled": (dataclasses.replace(TINY, classifier="unpooled"), ALL - {"relevance"}),
    "relative": (dataclasses.replace(TINY, position_embedding="relative"), ALL - {"positions"}),
    "learned-2d": (dataclasses.replace(TINY, position_embedding="learned-2d", position_injection="every-layer"), ALL),
    "axial": (dataclasses.replace(TINY, axial=True, classifier="gap"), ALL),
    "hybrid": (dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM), ALL),
    "early convolutions": (
        dataclasses.replace(TINY, patch_size=1, stem=keras_vit.ConvStem((4, 8), (3, 3), (2, 2))), ALL,
    ),
    "BiT": (keras_vit.ResNetConfig((1, 1), 8, num_groups=2), {"filters", "relevance"}),
    "axial ResNet": (dataclasses.replace(TINY_STEM, axial_heads=2), {"filters", "relevance"}),
}  # fmt: skip


@pytest.mark.parametrize("name", others_slow(MODELS, "token", "hybrid", "axial ResNet"))
def test_each_kind_of_model_has_its_figures(name):
    config, figures = MODELS[name]
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7))
    assert set(inspection.available_figures(model)) == figures
    found = inspection.inspect(model, [photo(20, 9), photo(12, 30)], checkpoint="c", shown=1)
    arrays = found.arrays
    grid = config.grid(TINY_IMAGE) if "distance" in figures else None
    assert all(np.all(np.isfinite(array)) for array in arrays.values())
    assert ("position_similarity" in arrays) == ("positions" in figures)
    assert arrays["images"].shape == (1, *TINY_IMAGE, 3)
    if grid is not None:
        layers = 4 if name == "axial" else 2
        names = ("attention", "rollout", "norms", "attention_distance")
        shapes = ((1, layers, 3, *grid), (1, layers, *grid), (1, 2, *grid), (layers, 3))
        assert {name: arrays[name].shape for name in names} == dict(zip(names, shapes, strict=True))
    if "relevance" in figures:
        assert sum(probability for _, probability in found.predictions[0].likeliest) <= 1.0 + 1e-6
    size = {"token": 4, "hybrid": 7, "early convolutions": 3, "BiT": 7}.get(name, arrays["filters"].shape[1])
    assert arrays["filters"].shape[1] == size


def test_the_arrays_are_what_the_definitions_give_for_what_happens_inside(tiny_model, tiny_images):
    photos = [photo(20, 9, seed=1), photo(12, 30, seed=2)]
    arrays = inspection.inspect(tiny_model, photos, checkpoint="c").arrays
    preprocessing = keras_vit.preprocessing_of(tiny_model)
    images = np.stack([preprocessing(one.pixels) for one in photos])  # as evaluation resizes them
    inside = {name: value.numpy() for name, value in keras_vit.intermediates(tiny_model)(images).items()}
    attentions = [inside["attention_0"], inside["attention_1"]]
    assert np.array_equal(arrays["images"][1], photos[1].pixels)
    np.testing.assert_allclose(arrays["attention"][:, 1], attentions[1][:, :, 0, 1:].reshape(2, 3, 3, 5), rtol=1e-5)
    rollout = inspection.attention_rollout(attentions)[:, :, 0, 1:].reshape(2, 2, 3, 5)
    np.testing.assert_allclose(arrays["rollout"], rollout.swapaxes(0, 1), rtol=1e-5)
    distance = inspection.mean_attention_distance(attentions[0], (3, 5), (4, 6), 1)
    np.testing.assert_allclose(arrays["attention_distance"][0], distance.mean(axis=0), rtol=1e-5)
    norms = np.linalg.norm(inside["block_1"][:, 1:], axis=-1).reshape(2, 3, 5)
    np.testing.assert_allclose(arrays["norms"][:, 1], norms, rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "array"), [("embedding", "filters"), ("Transformer.posembed_input", "logits"), ("head", "logits")]
)
def test_weights_that_are_no_numbers_are_refused_and_not_drawn_as_blanks(layer, array):
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7))
    weight = model.get_layer(layer).weights[0]
    weight.assign(np.full(weight.shape, np.nan))
    with pytest.raises(UserError, match=f"'{array}' of the model is not finite"):
        inspection.inspect(model, [photo(12, 30)], checkpoint="c", figures=["filters", "rollout", "relevance"])


def test_a_model_of_half_precision_gives_arrays_that_can_be_stored():
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    half = keras.models.clone_model(model, clone_function=_in_bfloat16)
    pairs = [randomize(model), randomize(half)]
    full, found = (inspection.inspect(one, [photo(12, 30)], checkpoint="c").arrays for one in pairs)
    assert {array.dtype.name for array in found.values()} <= {"float32", "float64", "uint8"}
    for name, array in full.items():
        np.testing.assert_allclose(found[name], array, rtol=0.1, atol=0.03 * np.abs(array).max())


def _in_bfloat16(layer: keras.layers.Layer) -> keras.layers.Layer:
    return layer.__class__.from_config({**layer.get_config(), "dtype": "mixed_bfloat16"})


def test_images_without_ink_are_left_out_of_its_measure():
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, channels=1, num_classes=7))
    black, drawn = (inspection.Image("p", np.zeros((*TINY_IMAGE, 1), np.uint8)) for _ in range(2))
    assert "rollout" not in inspection.inspect(model, [black], checkpoint="c").measures
    drawn.pixels[2:5, 3:9] = 255
    assert inspection.inspect(model, [black, drawn], checkpoint="c").measures["rollout"]["images"] == 1


def test_chosen_layers_and_heads_are_those_shown(tiny_model, tiny_images):
    all_of_it = inspection.inspect(tiny_model, [photo(12, 30)], checkpoint="c")
    chosen = inspection.inspect(tiny_model, [photo(12, 30)], checkpoint="c", layers=[-1], heads=[2, 0])
    np.testing.assert_allclose(chosen.arrays["attention"], all_of_it.arrays["attention"][:, [1]][:, :, [2, 0]])
    assert (chosen.layers, chosen.heads) == (("1",), (2, 0))


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (TINY, {"layers": [2]}, r"layers must be numbers from -2 to 1, but are \[2\]"),
        (TINY, {"heads": [-4]}, r"heads must be numbers from -3 to 2, but are \[-4\]"),
        (TINY, {"labels": ["a", "b"]}, "The model has 7 classes, but there are 2 class names"),
        (MODELS["BiT"][0], {"figures": ["rollout"]}, "one of filters, relevance, but is 'rollout'"),
        (MODELS["relative"][0], {"figures": ["positions"]}, "must be one of .*, but is 'positions'"),
    ],
)
def test_what_a_model_does_not_have_is_one_sentence(config, options, words):
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7)
    with pytest.raises(UserError, match=words):
        inspection.inspect(model, [photo(12, 30)], checkpoint="c", **options)


def test_features_of_any_block_are_a_model_on_the_grid(tiny_model, tiny_images, tmp_path):
    features = keras_vit.feature_map(tiny_model, "block_1")
    tokens = keras_vit.intermediates(tiny_model, ["block_1"])(tiny_images)["block_1"]
    expected = np.reshape(tokens[:, 1:], (5, 3, 5, 12))
    np.testing.assert_allclose(features(tiny_images), expected)
    features.save(tmp_path / "features.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "features.keras")(tiny_images), expected)
    hybrid = keras_vit.build(MODELS["hybrid"][0], image_size=TINY_IMAGE)
    assert keras_vit.feature_map(hybrid, "resnet_root").output.shape == (None, 3, 8, 4)
    for name in ("attention_0", "pre_logits"):
        with pytest.raises(UserError, match=f"The intermediate '{name}' has no place in the image"):
            keras_vit.feature_map(tiny_model, name)


def test_of_a_model_that_segments_the_surest_queries_and_their_masks_are_shown():
    task = keras_vit.SegmentationConfig(num_classes=3, num_queries=6, num_blocks=1, num_upscale_blocks=1)
    model = randomize(keras_vit.segmentation_model(TINY, task, image_size=TINY_IMAGE))
    images = [inspection.Image(f"{seed}.png", np.full((*TINY_IMAGE, 3), 40 * seed, np.uint8)) for seed in range(2)]
    found = inspection.inspect(model, images, checkpoint="c", labels=["a", "b", "c"])
    assert found.arrays.keys() == {"filters", "position_similarity", "images", "queries"}
    outputs = model(keras_vit.preprocessing_of(model)(np.stack([image.pixels for image in images])))
    classes = np.asarray(keras.ops.softmax(outputs["class_logits"]))[1, :, :3]
    query = classes.max(axis=1).argmax()
    mask = np.asarray(keras.ops.sigmoid(outputs["mask_logits"]))[1, ..., query]
    np.testing.assert_allclose(found.arrays["queries"][1, 0], mask, atol=1e-5)
    assert found.arrays["queries"].shape == (2, 4, 6, 10)
    assert found.queries[1][0] == f"{'abc'[classes[query].argmax()]}, {classes[query].max():.0%}"
    titles = [title for title, _ in image_maps(found, 1)]
    assert titles == list(found.queries[1])
    assert "The four surest" in html_report(found)
