"""TFLite files for phones and small boards."""
