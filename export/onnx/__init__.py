"""ONNX files, and a page that runs them in the browser."""
