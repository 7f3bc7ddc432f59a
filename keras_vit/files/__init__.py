"""File formats and file access: npz, safetensors, lazy arrays, labels, tables, atomic writes."""
