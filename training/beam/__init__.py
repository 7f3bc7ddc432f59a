"""The commands that also run as Apache Beam pipelines, which alone import Beam: embed, predict and shard."""
