"""Speed of the input pipeline of training."""
