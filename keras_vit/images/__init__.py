"""Images: formats, decoders (a TensorFlow graph, and Pillow), and the preprocessing of a model."""

from keras_vit.images.pillow import TooManyPixels, open_image

__all__ = ["TooManyPixels", "open_image"]
