"""Old name of `keras_vit.cli.progress`."""

from keras_vit.cli.progress import *  # noqa: F403
