"""ONNX and OpenVINO files."""
