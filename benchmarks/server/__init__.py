"""Image files in, probabilities out: a server of this project and servers of other libraries under load."""
