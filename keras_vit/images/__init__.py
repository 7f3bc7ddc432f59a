"""Images: formats, decoders (a TensorFlow graph, and Pillow), and the preprocessing of a model."""
