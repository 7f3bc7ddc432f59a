"""Training with Keras on JAX."""
