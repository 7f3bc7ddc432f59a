"""Old name of `keras_vit.cli.options` and `keras_vit.cli.parser`."""

from keras_vit.cli.options import *  # noqa: F403
from keras_vit.cli.parser import *  # noqa: F403
