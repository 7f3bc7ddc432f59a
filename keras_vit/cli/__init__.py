"""The lobby of all commands: their options, start, end, messages and progress."""

from keras_vit.cli.start import as_typed as as_typed
from keras_vit.cli.start import command_line as command_line
from keras_vit.cli.start import import_keras as import_keras
from keras_vit.cli.start import is_verbose as is_verbose
from keras_vit.cli.start import print_next as print_next
from keras_vit.cli.start import require_tensorflow as require_tensorflow
from keras_vit.cli.start import run as run
from keras_vit.cli.start import run_job as run_job
