"""The options of all commands, without TensorFlow and Keras, which `--help` need not wait for."""
