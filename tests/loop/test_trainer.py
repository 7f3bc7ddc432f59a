"""The training step: what stock Keras does otherwise, each against NumPy or another way to the same end."""

import dataclasses
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import ConvStem, ResNetConfig, UserError, ViTConfig
from keras_vit.models.attention import DotProductAttention, chunk_long_attention
from keras_vit.models.build import dtype_policy
from tests.support import others_slow, randomize
from training.loop.build import build_trainer
from training.loop.optimizers import make_optimizer
from training.loop.trainer import Trainer
from training.objectives.objective import Classification
from training.options.common import Execution
from training.recipes.pretrain import find_recipe

TINY = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
STEM = ResNetConfig((1, 1), 8, (16, 32), preactivation=False, num_groups=4)
FAMILIES = {
    "token": TINY,
    "map, dropout": dataclasses.replace(
        TINY, num_layers=1, classifier="map", dropout_rate=0.1, stochastic_depth_rate=0.1
    ),
    "relative positions": dataclasses.replace(TINY, position_embedding="relative", classifier="gap"),
    "axial": dataclasses.replace(TINY, axial=True, classifier="gap"),
    "convolutional stem": dataclasses.replace(TINY, patch_size=1, stem=ConvStem((6, 8), (3, 3), (2, 2))),
    "hybrid": dataclasses.replace(TINY, patch_size=1, stem=STEM),
    "bit": ResNetConfig((1, 1), 8, (16, 32), num_groups=4),
}


def trainer(
    config=TINY, *, kind="sgd", rate=0.1, image_size=16, classes=3, xla=False, loss="softmax", smooth=0.0, **options
) -> Trainer:
    keras.utils.set_random_seed(3)
    model = randomize(keras_vit.build(config, image_size=image_size, num_classes=classes))
    objective = options.pop("objective", Classification(loss, smooth))
    execution = Execution(remat=options.pop("remat", False))
    recipe = dataclasses.replace(find_recipe("digits"), **{"batch_size": 8, **options})
    made = Trainer(model, recipe, objective=objective, execution=execution)
    made.compile(make_optimizer(kind, model, rate, clip_norm=None), jit_compile=xla)
    return made


def batches(count=2, image_size=16, classes=3):
    rng = np.random.default_rng(1)
    images = rng.uniform(-1, 1, (8 * count, image_size, image_size, 3)).astype(np.float32)
    labels = np.eye(classes, dtype=np.float32)[rng.integers(0, classes, 8 * count)]
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(8, drop_remainder=True)


def flat(variables) -> np.ndarray:
    return np.concatenate([np.ravel(np.array(variable)) for variable in variables])


def test_the_average_follows_the_weights_and_is_what_is_evaluated():
    ours = trainer(ema_decay=0.75)
    expected = flat(ours.network.trainable_variables)
    (images, labels), *_ = batches()
    for step in batches(3):
        ours.train_on_batch(*step)
        expected = 0.75 * expected + 0.25 * flat(ours.network.trainable_variables)
    np.testing.assert_allclose(flat(ours.ema), expected, rtol=1e-4, atol=1e-6)
    weighted = tf.data.Dataset.from_tensors((images, labels, np.ones(8, np.float32)))
    measured = ours.evaluate(weighted, verbose=0, return_dict=True)
    for variable, average in zip(ours.network.trainable_variables, ours.ema, strict=True):
        variable.assign(average)
    logits = ours.network.predict(images, verbose=0)
    losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits).numpy()
    assert float(measured["loss"]) == pytest.approx(losses.mean(), rel=1e-5)


def test_a_step_of_sigmoid_loss_is_that_of_its_definition():
    ours = trainer(loss="sigmoid", smooth=0.3, rate=0.5)
    (images, labels), *_ = batches()
    head = ours.network.get_layer("head")
    before, logits = np.array(head.bias), ours.network.predict(images, verbose=0)
    ours.train_on_batch(images, labels)
    smooth = 0.7 * labels.numpy() + 0.3 / 3
    gradient = (1 / (1 + np.exp(-logits)) - smooth).sum(0) / 8  # of the sum over classes, mean over images
    np.testing.assert_allclose(np.array(head.bias), before - 0.5 * gradient, atol=1e-5)


@pytest.mark.slow
def test_accumulated_moving_statistics_are_those_of_one_micro_batch_after_the_other():
    whole = trainer(FAMILIES["convolutional stem"], rate=1e-9, batch_size=4)
    parts = trainer(FAMILIES["convolutional stem"], rate=1e-9, batch_size=8, accumulation=2)
    actual, expected = ([v for v in ours.network.weights if "moving_" in v.path] for ours in (parts, whole))
    before = flat(actual)
    for images, labels in batches(1):
        for begin in (0, 4):
            whole.train_on_batch(images[begin : begin + 4], labels[begin : begin + 4])
        parts.train_on_batch(images, labels)
    assert not np.allclose(flat(actual), before)
    np.testing.assert_allclose(flat(actual), flat(expected), rtol=1e-5)


def test_two_replicas_of_the_same_images_make_the_step_of_one_that_has_them_twice(monkeypatch):
    ours = trainer(dataclasses.replace(TINY, patch_size=1, stem=ConvStem((6,), (3,), (8,))), batch_size=4)
    images, labels = (rows[:2] for rows in next(iter(batches(1))))
    before = ours.network.get_weights()
    expected = ours.train_step((tf.repeat(images, 2, axis=0), tf.repeat(labels, 2, axis=0)))
    after = ours.network.get_weights()
    replica = types.SimpleNamespace(
        num_replicas_in_sync=2,
        replica_id_in_sync_group=0,
        all_reduce=lambda _, parts: tf.nest.map_structure(lambda part: 2.0 * part, parts),
    )
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: replica)
    ours.network.set_weights(before)
    ours.reset_metrics()
    ours.compile(make_optimizer("sgd", ours.network, 0.1, clip_norm=None), jit_compile=False)
    found = ours.train_step((images, labels))
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert any("moving_mean" in variable.path for variable in ours.network.weights)
    for variable, value in zip(ours.network.weights, after, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-4, atol=1e-5, err_msg=variable.path)


def test_dropout_is_drawn_anew_for_each_step_replica_and_micro_batch_and_again_for_the_same(monkeypatch):
    ours = trainer(FAMILIES["map, dropout"])
    first, again, other = ours.layer_seeds(0), ours.layer_seeds(0), ours.layer_seeds(1)
    ours.step.assign(1)
    later = ours.layer_seeds(0)
    second = types.SimpleNamespace(replica_id_in_sync_group=1)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: second)
    elsewhere = ours.layer_seeds(0)
    np.testing.assert_array_equal(flat(first), flat(again))
    assert len({flat(draw).tobytes() for draw in (first, other, later, elsewhere)}) == 4
    assert len({state.numpy().tobytes() for state in first}) == len(first) > 2  # another one for every layer


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.slow), "muon"])
def test_a_step_that_overflows_float16_is_left_out(kind):
    ours = trainer()
    inner = make_optimizer(kind, ours.network, 0.1, clip_norm=None)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**40)
    optimizer.build(ours.network.trainable_variables)
    ours.compile(optimizer, jit_compile=False)
    before = flat(ours.network.trainable_variables)
    (images, labels), *_ = batches()
    huge = tf.fill(images.shape, np.float32(3e38))
    ours.train_on_batch(huge, labels)
    np.testing.assert_array_equal(flat(ours.network.trainable_variables), before)
    assert float(np.array(optimizer.dynamic_scale)) == 2.0**39
    ours.train_on_batch(images, labels)
    assert not np.array_equal(flat(ours.network.trainable_variables), before)


TWICE = [*((family, 16, 8) for family in ("map, dropout", "axial", "hybrid", "bit")), ("token", 132, 1)]  # in chunks


@pytest.mark.parametrize(("family", "image_size", "batch_size"), others_slow(TWICE, ("map, dropout", 16, 8)))
def test_what_is_computed_twice_gives_the_same_step(family, image_size, batch_size, monkeypatch):
    monkeypatch.setattr("training.loop.devices.kernels.on_cpu", lambda: False)  # whose form takes seconds to compile
    options = {"rate": 0.5, "image_size": image_size, "batch_size": batch_size}
    once, twice = (trainer(FAMILIES[family], remat=remat, **options) for remat in (False, True))
    for images, labels in batches(2, image_size):
        losses = [
            ours.train_on_batch(images[:batch_size], labels[:batch_size], return_dict=True)["loss"]
            for ours in (once, twice)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    np.testing.assert_allclose(
        flat(twice.network.trainable_variables), flat(once.network.trainable_variables), atol=1e-4
    )


@pytest.mark.parametrize(
    ("image_size", "fields", "queries"),
    [
        (132, {}, 256),
        (128, {"classifier": "gap"}, None),  # 1,024 tokens
        (132, {"attention_dropout_rate": 0.1}, None),
        (132, {"locality_attention": True}, None),
    ],
)
def test_what_is_computed_twice_has_the_attention_of_many_tokens_in_chunks(image_size, fields, queries):
    ours = trainer(dataclasses.replace(TINY, num_layers=1, **fields), image_size=image_size, remat=True)
    layers = [layer for layer in ours.network.layers if isinstance(layer, DotProductAttention)]
    assert [layer.queries_at_a_time for layer in layers] == [queries]


def test_jax_keeps_its_fused_attention_when_blocks_are_computed_twice(on_jax):
    model = keras_vit.build(dataclasses.replace(TINY, num_layers=1), image_size=132, num_classes=3)
    chunk_long_attention(model)
    assert {layer.queries_at_a_time for layer in model.layers if isinstance(layer, DotProductAttention)} == {None}


@pytest.mark.parametrize("family", others_slow(["token", "map, dropout", "relative positions", "hybrid"], "token"))
def test_the_form_for_a_cpu_makes_the_same_steps(family, monkeypatch):
    ends = {}
    for form, on_cpu in (("layers", False), ("fused", True)):
        monkeypatch.setattr("training.loop.devices.kernels.on_cpu", lambda on_cpu=on_cpu: on_cpu)
        ours = trainer(FAMILIES[family], rate=0.01)
        for step in batches(3):
            ours.train_on_batch(*step)
        ends[form] = flat(ours.network.weights)
    assert np.abs(ends["fused"] - ends["layers"]).max() < 1e-5


def test_a_model_with_batch_normalization_is_not_computed_twice():
    model = keras_vit.build(FAMILIES["convolutional stem"], image_size=16, num_classes=3)
    with pytest.raises(UserError, match="batch normalization .* leave --remat out"):
        build_trainer(lambda: model, find_recipe("digits"), 6, execution=Execution(remat=True))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_compiles_under_xla_in_bfloat16_with_one_trace_and_finite_gradients(family, loss):
    """The nearest to a TPU that runs everywhere: static shapes, nothing left to the host."""
    with dtype_policy("mixed_bfloat16"):
        ours = trainer(FAMILIES[family], kind="adamw", rate=1e-3, loss=loss, xla=True)
    traces, step = [], ours.train_step
    ours.train_step = lambda data: traces.append(data) or step(data)
    before = flat(ours.network.trainable_variables)
    history = ours.fit(batches(3), epochs=2, shuffle=False, verbose=0).history
    assert len(traces) == 1
    assert np.isfinite(history["loss"]).all()
    after = flat(ours.network.trainable_variables)
    assert np.isfinite(after).all()
    assert not np.array_equal(before, after)
