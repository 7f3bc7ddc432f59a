"""SavedModel for TF Serving."""
