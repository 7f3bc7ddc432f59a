"""Training with other patches than the model's own: a random part of them, or another size in each step.

PatchDropout ("PatchDropout: Economizing Vision Transformers Using Patch Dropout", arXiv 2208.07220): keeping half of
the patches saves about half of the computation and memory of training, at little cost in accuracy.

FlexiViT ("FlexiViT: One Model for All Patch Sizes", arXiv 2212.08013): at patch sizes from 8 to 48, one FlexiViT-B is
about as accurate as a ViT-B that was trained at this size, and better than one that was trained at another (Figure 3).
"""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import ops

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from keras_vit.checkpoints.load import values_by_key, weights_by_key
from keras_vit.models.build import dtype_policy
from keras_vit.models.layers import no_init_weights
from keras_vit.models.weight_resizing import resize_patch_kernel, resize_position_embedding
from training.loop.devices.kernels import fast_here, on_cpu
from training.objectives.objective import Objective

_KERNEL, _POSITIONS = "embedding/kernel", "Transformer/posembed_input/pos_embedding"


class OtherPatches(Objective):
    """An objective whose outputs are computed from other patches in training."""

    without_remat = "--patch-sizes and --patch-dropout"
    needs = ""  # what takes which model, as a sentence

    def __init__(self, objective: Objective, uncounted: str):
        self._objective = objective
        self.metrics, self.metric_dtype = objective.metrics, objective.metric_dtype
        self.uncounted = (*objective.uncounted, uncounted)

    def fits(self, config: ViTConfig) -> bool:
        """Whether a model can be trained so."""
        raise NotImplementedError

    def prepare(self, model):
        config = keras_vit.config_of(model)
        if not isinstance(config, ViTConfig) or not self.fits(config):
            raise UserError(f"{self.needs}; leave it out.")
        prepared = self._objective.prepare(model)
        self.constants = self._objective.constants
        return prepared

    def measure(self, images, labels, outputs, weights):
        return self._objective.measure(images, labels, outputs, weights)

    def evaluation(self):
        return self._objective.evaluation()


class PatchDropout(OtherPatches):
    """A network that computes a random part of the patches of each image. rate: share that is dropped, but not all."""

    needs = "--patch-dropout is for a Vision Transformer with positions at its input"

    def __init__(self, rate: float, objective: Objective):
        super().__init__(
            objective, f"that --patch-dropout leaves {rate:.4g} of the patches out, which saves about that share"
        )
        self._rate = rate

    def fits(self, config):
        of_grid = config.axial or config.position_embedding == "relative" or config.is_rotary
        return config.position_injection == "input" and not of_grid

    def forwards(self, network, trained, step, averages):
        if not on_cpu():
            trained = network  # a GPU's attention is for all patches
        embedded = trained.get_layer("Transformer.encoderblock_0.LayerNorm_0").input
        self._prefix = keras_vit.config_of(network).num_prefix_tokens
        self._patches = embedded.shape[1] - self._prefix
        self._kept = max(round(self._patches * (1.0 - self._rate)), 1)
        self._stem = keras.Model(trained.input, embedded)
        self._blocks = keras.Model(embedded, trained.output)
        self._seed = keras.random.SeedGenerator()
        self.random = [self._seed.state]
        return [self._outputs]

    def _outputs(self, images, training):
        tokens = self._stem(images, training=training)  # (B, P + n, D)
        noise = keras.random.uniform((ops.shape(tokens)[0], self._patches), dtype="float32", seed=self._seed)
        kept = ops.sort(ops.top_k(noise, self._kept)[1], axis=-1)  # (B, k)
        patches = ops.take_along_axis(tokens[:, self._prefix :], kept[..., None], axis=1)  # (B, k, D)
        tokens = ops.concatenate([tokens[:, : self._prefix], patches], axis=1)
        return self._blocks.call(tokens, training=training)  # not by __call__, which would expect all patches


class FlexiblePatches(OtherPatches):
    """A network at several patch sizes, one of which is computed in each step.

    The step and the seed of the run decide, the same on all replicas and for all micro-batches.
    """

    needs = "--patch-sizes is for a Vision Transformer that cuts the image itself"

    def __init__(self, patch_sizes: Sequence[int], seed: int, objective: Objective):
        sizes = ", ".join(map(str, patch_sizes))
        more = "smaller ones are more tokens"
        super().__init__(objective, f"that --patch-sizes trains with patches of {sizes} pixels in turn: {more}")
        self._patch_sizes, self._seed = patch_sizes, seed
        self._generator = keras.random.SeedGenerator()

    def fits(self, config):
        return config.stem is None

    def forwards(self, network, trained, step, averages):
        self._step, config = step, keras_vit.config_of(network)
        preprocessing, classes = preprocessing_of(network), network.output_shape[-1]

        def with_patches(size: int) -> keras.Model:
            resized = dataclasses.replace(config, patch_size=size)
            return keras_vit.build(resized, preprocessing=preprocessing, num_classes=classes)

        return [
            trained if (size, size) == config.patch else Resized(network, lambda size=size: with_patches(size))
            for size in self._patch_sizes
        ]

    def choice(self):
        state = self._generator.state
        key = ops.stack([ops.cast(self._seed % 2**31, state.dtype), ops.cast(self._step.value, state.dtype)])
        with keras.StatelessScope([(state, key)]):
            return keras.random.randint((), 0, len(self._patch_sizes), seed=self._generator)


class Resized:
    """A network at another patch size or image size, on the weights of the original: images, training -> its outputs.

    Patch kernel and learned positions are resized in each call, as `keras_vit.adapt` does once.
    """

    def __init__(self, network: keras.Model, build: Callable[[], keras.Model]):
        """Create it under the strategy of the network, whose weights are used. build: returns it at the other size.

        Raises UserError for a network with other weights whose shapes depend on the size.
        """
        self._network = network
        with dtype_policy(network.get_layer("embedding").dtype_policy.name), no_init_weights():
            model = build()
        self._variables, self._seeds, self._model = weights_by_key(model), _seeds(model), fast_here(model)
        config, resized = keras_vit.config_of(network), keras_vit.config_of(model)
        assert isinstance(config, ViTConfig)  # as the callers check
        assert isinstance(resized, ViTConfig)
        self._matrices = {}
        if config.patch != resized.patch:
            self._matrices[_KERNEL] = _kernel_matrix(config.patch, resized.patch)
        old, new = config.grid(preprocessing_of(network).image_size), resized.grid(preprocessing_of(model).image_size)
        if _POSITIONS in self._variables and old != new:
            prefix = config.num_prefix_positions
            table = np.eye(prefix + old[0] * old[1], dtype=np.float32)
            self._matrices[_POSITIONS] = resize_position_embedding(table, old, new, prefix)
        for key, variable in weights_by_key(network).items():
            if key not in self._matrices and "lora" not in key and self._variables[key].shape != variable.shape:
                only = f"Training at several sizes resizes learned positions only, not {key}"
                raise UserError(f"{only}; leave --patch-sizes and --local-crops out.")

    def __call__(self, images, training):
        # Read outside of the scope below, because the variables may have other values in that of the caller.
        pairs = zip(self._seeds, _seeds(self._network), strict=True)
        mapping = [(new, ops.convert_to_tensor(old)) for new, old in pairs]
        for key, value in values_by_key(self._network).items():
            value, variable = ops.convert_to_tensor(value), self._variables[key]
            if key in self._matrices:
                matrix = self._matrices[key]
                value = ops.reshape(matrix @ ops.reshape(value, (matrix.shape[1], -1)), variable.shape)
            mapping.append((variable, value))
        with keras.StatelessScope(mapping):
            return self._model(images, training=training)


def _kernel_matrix(old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
    """Return the (new h * w, old h * w) matrix that resizes a patch kernel."""
    size = old[0] * old[1]
    basis = np.eye(size, dtype=np.float32).reshape(*old, 1, size)
    return resize_patch_kernel(basis, new).reshape(new[0] * new[1], size)


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
