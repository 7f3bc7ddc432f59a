"""What an image is: its formats, its decoders (a TensorFlow graph, and Pillow), and the preprocessing of a model."""
