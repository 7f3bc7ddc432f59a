"""All that a model is but for its weights: read from a model, built, and described for a writer."""

import dataclasses
from typing import TYPE_CHECKING

from keras_vit.errors import UserError
from keras_vit.models.config import (
    Classes,
    DetectionConfig,
    ModelConfig,
    ResNetConfig,
    SegmentationConfig,
    TaskConfig,
    ViTConfig,
)

if TYPE_CHECKING:
    import keras

    from keras_vit.images.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """All that a model is but for its weights."""

    config: ModelConfig
    """The config of the model, or that of the backbone of a further task."""
    preprocessing: "Preprocessing"
    num_classes: int = 0
    """Width of the head; 0 without a head."""
    task: TaskConfig | None = None
    """The further task of the model; None for a classifier or features."""
    classes: Classes | None = None
    """The names of its classes; None if they are unknown."""
    classifier_activation: str | None = None
    """Activation of the head; None for logits."""
    dtype: str | None = None
    """A Keras dtype policy; None for the global one."""
    name: str | None = None

    @classmethod
    def of(cls, model: "keras.Model") -> "Blueprint":
        """Return that of a model which `keras_vit.build` created, also after saving and loading."""
        from keras_vit.models import build as asked  # lazy: imports Keras

        task, head = asked.task_of(model), asked.classifier_head(model)
        widths = {} if head is None else {weight.name: weight.shape[-1] for weight in head.weights}
        return cls(
            asked.config_of(model),
            asked.preprocessing_of(model),
            task.num_classes if isinstance(task, SegmentationConfig) else widths.get("bias", widths.get("kernel", 0)),
            task,
            asked.saved_classes(model),
            asked.classifier_activation_of(model),
            asked.model_spec(model).dtype_policy.name,
            model.name,
        )

    def build(self) -> "keras.Model":
        """Build the model, with initial weights. Raises UserError for a task on a model that is no plain encoder."""
        from keras_vit.models.build import build, dtype_policy, numbers_of_classes, set_classes

        if self.task is None:
            model = build(
                self.config,
                preprocessing=self.preprocessing,
                num_classes=self.num_classes,
                classifier_activation=self.classifier_activation,
                dtype=self.dtype,
                name=self.name,
            )
        else:
            with dtype_policy(self.dtype):
                model = self._network_of_task(self.task)
        if self.classes is not None and len(self.classes.labels) in numbers_of_classes(model):
            set_classes(model, self.classes)
        return model

    def _network_of_task(self, task: TaskConfig) -> "keras.Model":
        from keras_vit.models.detection import detection_network
        from keras_vit.models.segmentation import linear_segmentation_network, segmentation_network

        config, images = _backbone(self.config), self.preprocessing
        if isinstance(task, DetectionConfig):
            return detection_network(config, task, images, self.name or "detection")
        if isinstance(task, SegmentationConfig):
            return segmentation_network(config, task, images, self.name or "segmentation")
        return linear_segmentation_network(config, task, images, self.name or "segmentation")

    @property
    def vit(self) -> ViTConfig:
        """The config of a Vision Transformer."""
        assert isinstance(self.config, ViTConfig)
        return self.config

    @property
    def resnet(self) -> ResNetConfig:
        """The config of a ResNet."""
        assert isinstance(self.config, ResNetConfig)
        return self.config

    @property
    def segmentation(self) -> SegmentationConfig:
        """The task of a model that segments."""
        assert isinstance(self.task, SegmentationConfig)
        return self.task

    @property
    def detection(self) -> DetectionConfig:
        """The task of a model that detects."""
        assert isinstance(self.task, DetectionConfig)
        return self.task

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its classes; empty if they are unknown."""
        return self.classes.labels if self.classes else ()


def _backbone(config: ModelConfig) -> ViTConfig:
    """The configuration without what reads the tokens. Raises UserError for one that is no plain encoder."""
    if (
        not isinstance(config, ViTConfig)
        or config.axial
        or config.locality_attention
        or config.position_embedding == "relative"
        or config.distillation != "none"
        or config.position_injection != "input"
    ):
        raise UserError(
            "Segmentation and detection need a plain Vision Transformer, not a ResNet, and without axial attention, "
            "relative positions, locality, distillation token and positions in every layer; take another model."
        )
    return dataclasses.replace(
        config,
        classifier="none",
        with_class_token=config.has_class_token,
        norm_after_pooling=False,
        final_norm=True,  # of the task
        representation_size=None,
        representation="tanh",
        normalized=False,
        head_bias=True,
    )
