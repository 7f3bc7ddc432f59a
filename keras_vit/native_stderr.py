"""Old name of `keras_vit.cli.native_stderr`."""

from keras_vit.cli.native_stderr import *  # noqa: F403
