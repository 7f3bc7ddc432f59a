"""From files to batches with tf.data. Start reading at `sources.py`, then `pipeline.py`."""
