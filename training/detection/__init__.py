"""Detection: detectors are trained, used and measured."""
